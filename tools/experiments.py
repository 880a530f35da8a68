"""The experiments METHOD-SIZE and their commands.

tools/experiments.py list            print every experiment with its command
tools/experiments.py help            print every method with a description
tools/experiments.py NAME [FLAGS]    print the command of an experiment; FLAGS replace the experiment's own

run.sh calls this file before the set-up, so the file needs no packages.
"""

import os
import shlex
import signal
import sys
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The path from the current folder to the repository.
REPO = f"{os.path.relpath(ROOT)}/".removeprefix("./")

# Methods, and sizes that each of these methods has. The name of an experiment lacks a slash and the text after it:
# grpo/math with the size math is the experiment grpo-math.
EXPERIMENTS = [
    ("sspo sir grpo gspo dapo", "toy 135m 0.5b 1.5b 7b"),
    ("newline period clip-high gspo-0.2 drgrpo", "toy 1.5b 7b"),
    ("cwgrpo grpo-kl clip-cov", "toy 135m 0.5b 1.5b 7b"),
    ("dapo-sps gspo-sps", "1.5b/sps 7b/sps"),
    ("dapo", "zero"),
    ("drgrpo grpo/math", "math"),
    ("grpo/rs", "rs1 rs3"),
    ("sspo-clip-cov", "1.5b 7b"),
    ("gpg gpg-a", "toy 135m 0.5b 7b math rs1 rs3"),
    ("gpg-b gpg-c", "toy 135m 0.5b 7b math"),
    ("gpg-group-alpha gpg-batch gpg-kl", "toy math"),
    ("gpg gpg-a gpg-b gpg-c grpo/images", "image-toy ground-toy"),
    ("gpg grpo/images", "geoqa flower pets aircraft car sat lisa"),
    ("sps sps-grpo", "135m"),
    ("sps sps-grpo sps-act sps-uniform sps-quantile sps-k", "toy 0.5b 1.5b/sps 7b/sps"),
]

# ------------------------------------------------------------ methods: script and flags, a description with its source
GRPO = "sspo.py --clip=fixed --delimiter=token"
DAPO = f"{GRPO} --clip-high=0.28 --normaliser=token --valid-share=1 --overlong-buffer=2048"
ROW_A = "gpg.py --norm=group --no-accurate-gradient --beta-th=0"
METHODS = {
    "sspo": ("sspo.py", "SSPO (Table 1)"),
    "sir": ("sspo.py --clip=fixed", '"+SIR": fixed clip 0.2 (ours; Table 2, \\n\\n of Table 3)'),
    "newline": ("sspo.py --clip=fixed --delimiter=\\n", "segments end at \\n (inferred; Table 3)"),
    "period": ("sspo.py --clip=fixed --delimiter=.", 'segments end at "." (inferred; Table 3)'),
    "grpo": (GRPO, "GRPO: a ratio per token (Table 1)"),
    # The TRLs of GPG's releases divide GRPO's loss by the tokens of a device's micro-batch. With --normaliser=response
    # the next two are as in Eq. 28.
    "grpo/math": ("cwgrpo.py --reweight=none --normaliser=token", "math: KL to the initial model (GPG: Tables 1, 15)"),
    "grpo/rs": (f"{ROW_A} --kl-coef=0.04", "rs1, rs3: GRPO's gradient as in GPG's release, gpg.py's rewards"),
    "grpo/images": (f"{ROW_A} --kl-coef=0.04", "images: with one update GRPO's gradient"),
    "clip-high": (f"{GRPO} --clip-high=0.28", "GRPO with upper clip 0.28 (Table 1)"),
    "gspo": ("sspo.py --clip=fixed --delimiter= --clip-low=3e-4 --clip-high=4e-4", "GSPO's own clip"),
    "gspo-0.2": ("sspo.py --clip=fixed --delimiter=", "a ratio per response, clip 0.2 (Fig. 3b, maybe Table 1)"),
    "drgrpo": (f"{GRPO} --no-scale-advantage --normaliser=constant", "Dr. GRPO (Table 1)"),
    "dapo": (DAPO, "SPS's Table 2, without SWIFT's filter; penalty over a response's last tokens"),
    "dapo-sps": (DAPO, "the same on SPS's data"),
    "gspo-sps": ("sspo.py --clip=fixed --delimiter= --clip-low=3e-4 --clip-high=4e-4", "GSPO on SPS's data (Table 2)"),
    "cwgrpo": ("cwgrpo.py", "the Gaussian kernel, KL to the initial model"),
    "grpo-kl": ("cwgrpo.py --reweight=none", "the same KL"),
    "clip-cov": ("cwgrpo.py --reweight=clip-cov --normaliser=token", "Clip-Cov's mask, same KL"),
    "sspo-clip-cov": ("cwgrpo.py --reweight=clip-cov --normaliser=token --kl-coef=0", "CLIP-Cov of SSPO (Table 1)"),
    "gpg": ("gpg.py", "row D of Table 15, recommended: alpha, threshold 0.6"),
    "gpg-a": (ROW_A, "row A: std of the group, no alpha, no threshold (Tables 11, 13)"),
    "gpg-b": ("gpg.py --no-accurate-gradient --beta-th=0", "row B: no normalisation"),
    "gpg-c": ("gpg.py --beta-th=0", "row C: row B with alpha"),
    "gpg-group-alpha": ("gpg.py --norm=group --beta-th=0", "row A with alpha (Table 1)"),
    "gpg-batch": (f"{ROW_A} --norm=batch", "std of the batch (Table 13)"),
    "gpg-kl": (f"{ROW_A} --kl-coef=0.04", "row A with a KL (section 3.4)"),
    "sps": ("sps.py --irl-lr=5e-10", "as printed: IRL learning rate 5e-10 (135m: 3e-6, ours)"),
    "sps-grpo": ("sps.py --irl-lr=5e-10 --irl-steps=0", "without IRL stages"),
    "sps-act": ("sps.py", "an IRL learning rate that acts, its size's (ours)"),
    "sps-uniform": ("sps.py --choose=uniform", "demonstrations drawn at random (section 4.1)"),
    "sps-quantile": ("sps.py --choose=quantile", "from a step's lower 3/8 (C.1; ours)"),
    "sps-k": (
        "sps.py --irl-steps=0 --irl-passes=1",
        "whole passes over K of each prompt's responses: --demonstrations 1 to 5 (Fig. 4)",
    ),
}

# ------------------------------------------------------------------------ sizes: model, data, lengths and evaluation
AIME24 = "HuggingFaceH4/aime_2024"
OTHERS = "HuggingFaceH4/MATH-500,knoveleng/Minerva-Math,knoveleng/OlympiadBench"
MATHARENA = "MathArena/brumo_2025,MathArena/hmmt_feb_2025,MathArena/hmmt_nov_2025"
MATH_3TO5 = f"{REPO}data/understand-r1-zero/datasets/train/math_lvl3to5_8k"
SEE = f"{REPO}tasks/toy-images/"
SMOLLM = f"{REPO}tasks/smollm/"
# Which command of run.sh makes each folder.
NEEDS = {MATH_3TO5: "data", SEE: "toy-images", SMOLLM: "smollm"}
LARGE = "--activation-checkpointing"
FAST = "--no-activation-checkpointing"
B1 = f"{FAST} --micro-batch-tokens=32768"
# With B1 and B7, models of 1.5B and 7B use 3/4 of 8 GPUs of 80 GB.
B7 = f"{LARGE} --micro-batch-tokens=65536"
FLAT = "--temperature=1 --lr-warmup=0 --lr-schedule=constant --lr-floor=0 --weight-decay=0.01"
AWAKE = ""
if os.environ.get("MACHINE") == "gpu":  # run.sh sets this variable.
    AWAKE = "--keep-awake --gpu-memory-utilization=0.1"
TOY = f"""{AWAKE} {FAST} --model={REPO}tasks/toy/model --reward=math --template=plain
    --dataset={REPO}tasks/toy/train.jsonl
    --eval={REPO}tasks/toy/heldout.jsonl,{REPO}tasks/toy/harder.jsonl --eval-samples=8
    --eval-temperature=1 --eval-every=40 --prompts-per-step=32 --max-prompt-tokens=32
    --max-response-tokens=96 --lr=2e-4 --steps=120"""
SEEN = f"{TOY} --model={SEE}model --image-column=image"
PRETRAINED = f"""{AWAKE} {FAST} {FLAT} --model={SMOLLM}model --template={REPO}tasks/smollm.txt
    --dataset={SMOLLM}train.jsonl --eval={SMOLLM}heldout.jsonl,{SMOLLM}harder.jsonl --eval-samples=8
    --eval-temperature=1 --eval-every=100 --group-size=8 --prompts-per-step=8 --max-prompt-tokens=256
    --max-response-tokens=48 --micro-batch-tokens=1024 --lr=5e-6 --steps=12 --reward=math"""
# Of 24 GiB, training takes 18 and vLLM takes 5 (computed). This size was never run.
GSM8K = f"""{AWAKE} {LARGE} {FLAT} --gpu-memory-utilization=0.2 --model=Qwen/Qwen2.5-0.5B-Instruct
    --template=chat-boxed --dataset=openai/gsm8k:main:train --eval=openai/gsm8k:main:test --eval-every=29
    --max-prompt-tokens=512 --max-response-tokens=1024 --lr=2e-6 --reward=math"""
SSPO = f"--eval={AIME24},AI-MO/aimo-validation-amc,{OTHERS} --keep-best --dataset={MATH_3TO5}"
# These are defaults of sspo.py, for other scripts.
AS_SSPO = f"""{SSPO} {FLAT} --template=qwen-math --prompts-per-step=128 --group-size=8 --steps=200
    --updates-per-step=4 --max-prompt-tokens=1024 --max-response-tokens=3000
    --max-total-tokens=0 --no-format-reward --checkpoints-kept=2 --reward=math"""
GPG = f"{B7} --eval={AIME24},knoveleng/AMC-23,{OTHERS}"
# These are defaults of gpg.py, for other scripts.
AS_GPG = "--model=Qwen/Qwen2.5-Math-7B --template=qwen-boxed --weight-decay=0.1 --reward=open_r1_gpg"
MATH = f"""{GPG} --dataset=DigitalLearningGmbH/MATH-lighteval:train --max-prompt-tokens=512
    --max-response-tokens=1024 --lr=3e-6 --lr-warmup=0.1 --lr-schedule=cosine
    --lr-floor=0"""  # These values are from footnote 1.
# This is the recipe of Open-RS. The decay is TRL's default.
RS = f"""{B1} --model=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --template=open-rs --format-reward
    --group-size=6 --prompts-per-step=64 --max-prompt-tokens=512 --max-response-tokens=3584
    --temperature=0.7 --lr-warmup=0.1 --lr-schedule=cosine --lr-floor=0.1 --weight-decay=0"""
# 16 prompts a step: 8 GPUs have one prompt each and accumulate twice (sat: once). We infer 8 GPUs from G = 8 and a
# micro-batch of 1; the releases' test.sh has 2. beta_th is their min_inverse_alpha. The rest are defaults of TRL.
IMAGES = f"""{LARGE} --image-column=image --max-pixels=401408 --model=Qwen/Qwen2-VL-2B-Instruct
    --template=chat --beta-th=0.4 --normaliser=response --format-reward --prompts-per-step=16
    --max-prompt-tokens=1024 --max-response-tokens=256 --weight-decay=0 --lr-schedule=linear"""
IOU = "--reward=iou"
CLASSES = f"{IMAGES} --reward=class_name --dataset=laolao77/ViRFT_CLS"


# With 512 responses a step (16 x 4 on each of 8 devices, ours), the sizes below train for one epoch. A method with a
# threshold draws more prompts in each step.
EPOCH = "--prompts-per-step=64"


def sps(flags):
    """Return an entry of SIZES for a size of SPS's paper, with 3,000 problems. `flags` are the flags of the model."""
    return {
        "all": f"""{flags} --subset=3000 --eval={AIME24},math-ai/aime25,{MATHARENA}
            --eval-samples=128 --eval-temperature=0.7 --eval-every=100 --keep-best""",
        "sspo.py": """--dataset=Elliott/Openr1-Math-46k-8192 --max-response-tokens=3072 --lr=5e-7
            --reward=open_r1 --steps=700 --weight-decay=0.1 --adam-betas 0.9 0.95
            --prompts-per-step=16 --updates-per-step=1""",
        "sps.py": "--irl-lr=5e-7",
        "gspo-sps": "--prompts-per-step=64 --updates-per-step=4 --steps=175 --eval-every=25",
        "sps-k": "--steps=376",  # Two epochs of 3,000 problems.
    }


# The flags of a size: `all` for all methods, a script's name for the methods of that script, a method's name for it.
SIZES = {
    "toy": {  # docs/cwgrpo.md explains why the KL of cwgrpo.py is small here.
        "all": TOY,
        "cwgrpo.py": "--no-format-reward --group-size=8 --temperature=1 --kl-coef=0.004",
        "sps.py": "--rl-steps=40 --irl-batch=256 --subset=0 --irl-lr=3e-4",  # Three rounds.
        "dapo": "--overlong-buffer=32",  # A response has at most 96 tokens.
    },
    "image-toy": {
        "all": f"{SEEN} --dataset={SEE}image-train.parquet --eval={SEE}image-heldout.parquet --steps=60 --eval-every=20"
    },
    "ground-toy": {"all": f"{SEEN} --dataset={SEE}ground-train.parquet --eval={SEE}ground-heldout.parquet {IOU}"},
    "135m": {
        "all": PRETRAINED,
        "sspo.py": "--updates-per-step=2",
        "cwgrpo.py": "--no-format-reward",
        "sps.py": "--subset=0 --rl-steps=5 --irl-batch=32",  # Two rounds and two steps.
        "sps": "--irl-lr=3e-6",
        "sps-grpo": "--irl-lr=3e-6",
        "dapo": "--overlong-buffer=10",  # A response has at most 48 tokens.
    },
    "0.5b": {
        "all": f"{GSM8K} {EPOCH} --steps=116",
        "sspo.py": "--lr=1e-6",  # A step has four updates.
        "cwgrpo.py": "--group-size=8 --no-format-reward",
        "sps.py": "--subset=0 --rl-steps=29 --irl-lr=5e-7",  # Four rounds.
        "dapo": "--overlong-buffer=205",  # A response has at most 1,024 tokens.
    },
    "1.5b": {"all": B1, "sspo.py": SSPO, "sspo-clip-cov": f"{AS_SSPO} --model=Qwen/Qwen2.5-Math-1.5B"},
    "7b": {
        "all": B7,
        # alpha and gamma have an effect only with --clip=entropy.
        "sspo.py": f"{SSPO} --model=Qwen/Qwen2.5-Math-7B --alpha=0.15 --gamma=2.2",
        "cwgrpo.py": "--model=Qwen/Qwen2.5-Math-7B-Instruct --no-format-reward --steps=150",
        "gpg.py": GPG,
        "sspo-clip-cov": f"{AS_SSPO} --model=Qwen/Qwen2.5-Math-7B",
    },
    # GPG's Table 9. The penalty of dapo is over 614 of 3,072 tokens. The number of draws is verl's.
    "zero": {
        "all": f"{GPG} {AS_GPG} --dataset=BytedTsinghua-SIA/DAPO-Math-17k --max-response-tokens=3072",
        "dapo": "--prompts-per-step=144 --steps=1100 --overlong-buffer=614 --max-draws=10 --updates-per-step=1",
    },
    "math": {
        "all": f"{MATH} {EPOCH} --steps=117",
        "sspo.py": f"{AS_GPG} --updates-per-step=1",
        "cwgrpo.py": f"{AS_GPG} --no-format-reward --group-size=8 --temperature=1",
    },
    "rs1": {"all": f"{RS} --dataset=knoveleng/open-s1 --steps=100"},
    "rs3": {"all": f"{RS} --dataset=knoveleng/open-rs --steps=50"},
    "geoqa": {  # One epoch: 8,031 problems in steps of 16.
        "all": f"""{IMAGES} --model=Qwen/Qwen2.5-VL-3B-Instruct --template={REPO}tasks/geoqa.txt
            --reward=geoqa --dataset=leonardPKU/GEOQA_R1V_Train_8K --steps=502""",
    },
    # Steps of the next four: classes x shots x epochs / 16.
    "flower": {"all": f"{CLASSES}_flower_4_shot --steps={102 * 4 * 8 // 16}"},
    "pets": {"all": f"{CLASSES}_pets37_4shot --steps={37 * 4 * 24 // 16}"},
    "aircraft": {"all": f"{CLASSES}_fgvc_aircraft_4_shot --steps={100 * 4 * 8 // 16}"},
    "car": {"all": f"{CLASSES}_car196_4shot --steps={196 * 4 * 8 // 16}"},
    "sat": {  # Two epochs of about 12,000 problems in steps of 8.
        "all": f"""{IMAGES} --model=Qwen/Qwen2-VL-2B --template={REPO}tasks/sat.txt --prompts-per-step=8
            --steps=3000 --reward=class_name --max-response-tokens=700 --dataset={REPO}data/sat.parquet""",
    },
    # Visual-RFT, too, trains for 6 epochs.
    "lisa": {"all": f"{IMAGES} {IOU} --dataset={REPO}data/lisa-train.parquet --steps=498"},
    "1.5b/sps": sps(f"{B1} --model=Qwen/Qwen2.5-Math-1.5B"),
    # Micro-batches are smaller than B7's, because the moments of IRL's AdamW take memory, too.
    "7b/sps": sps(f"{LARGE} --micro-batch-tokens=49152 --model=Qwen/Qwen2.5-Math-7B"),
}

# ------------------------------------------------------------------------------------------------------- commands
NAMES = {}  # The method and the size of each experiment, in the order of `list`.
for methods, sizes in EXPERIMENTS:
    for method in methods.split():
        for size in sizes.split():
            NAMES[f"{method.partition('/')[0]}-{size.partition('/')[0]}"] = (method, size)


def key_of(flag):
    """Return the name of a flag: NAME for --NAME, --NAME=value and --no-NAME."""
    return flag.removeprefix("--").removeprefix("no-").partition("=")[0]


def command_of(name, given=()):
    """Return the words of the command of an experiment. The flags come from the size for all methods, from the size for
    the script, from the method, and from the size for this method. If a flag comes from several of these, the last one
    counts. `given` has flags of the user, which replace all others and come last, as they are."""
    method, size = NAMES[name]
    there = SIZES[size]
    script, *own = METHODS[method][0].split()
    words = [*there["all"].split(), *there.get(script, "").split(), *own, *there.get(method, "").split()]
    kept = {}
    for word in words:
        if word.startswith("--"):
            key = key_of(word)
            kept[key] = []
        kept[key].append(word)
    for word in given:
        if word.startswith("--"):
            kept.pop(key_of(word), None)
    return [os.environ.get("SCRIPT") or REPO + script, *chain(*kept.values()), *given]


if __name__ == "__main__":
    # `./run.sh list | head` then ends without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    word, *given = sys.argv[1:]
    if word == "help":
        for method, (_, place) in METHODS.items():
            print(f"  {method.partition('/')[0]}  {place}")
    elif word == "list":
        for name in NAMES:
            print(shlex.join([name, *command_of(name)]))
    elif word in NAMES:
        print(shlex.join(command_of(word, given)))
    else:
        print(f"run.sh: no experiment or command {word}: ./run.sh list", file=sys.stderr)
        sys.exit(2)
