#!/usr/bin/env bash
# Sets everything up in .venv, and holds the exact command of every experiment: script, recipe's flags, method's flags.
set -euo pipefail
here=$PWD
cd "$(dirname "$(readlink -f "$0")")"
if [ "${1:-}" = test ]; then CPU=1; fi  # the tests are exact in float32: they are of the path without GPUs
gpus=no processes=${PROCESSES:-2}  # where there are no GPUs
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then gpus=yes; fi
venv=.venv
if [ -n "${CPU:-}" ]; then
  export CUDA_VISIBLE_DEVICES=
  if [ $gpus = yes ]; then venv=.venv-cpu gpus=no; fi
fi
python=$venv/bin/python

help() {
  cat <<'END'
./run.sh                     set up, then train SSPO on the embedded default (no downloads; minutes on 2 CPU cores)
./run.sh test [ARGS]         set up, then run the tests (arguments go to pytest)
./run.sh setup               set up only
./run.sh data                fetch the training problems that sspo.py has by default, without setting up
./run.sh EXPERIMENT [ARGS]   set up, then run EXPERIMENT; arguments go to the script, e.g. --seed 2 --steps 500
./run.sh check [MODEL]       check a new machine in ten minutes: a table of figures, bounds, ok or FAIL
./run.sh eval MODEL [ARGS]   a hub id, model folder or run folder by the papers' protocols (docs/evaluation.md)
./run.sh plot RUN... [-o F]  draw the curves of run folders into one picture; --figure tokens: what the loss saw
./run.sh sweep EXPERIMENT... [--seeds 1 2 3] [--jobs 2] [ARGS]   run what is missing of these, then print their table
./run.sh table RUN...        a row for each method: mean and error over seeds, differences to the first
./run.sh claims [NAME...]    sweeps of five seeds: what docs/claims.md reports, its tables and pictures
CPU=1 ./run.sh ...           without GPUs, even where there are some
DRY=1 ./run.sh EXPERIMENT    print the script and its flags, and do nothing
SCRIPT=mine.py ./run.sh EXPERIMENT   the same flags for another script, a copy of the experiment's own
./run.sh list                print every EXPERIMENT, its script and its method's flags, separated by tabs
./run.sh help                this text; `./run.sh sspo-toy --help` lists the script's flags

EXPERIMENT is METHOD-SIZE. SIZE is the model and its data, lengths and evaluation. Begin with these:
  toy                    the embedded default: nothing to download, minutes on 2 CPU cores
  135m                   SmolLM2-135M-Instruct on arithmetic: a pretrained model on 2 CPU cores; 93 MB at first use
  0.5b                   Qwen2.5-0.5B-Instruct on GSM8K: a first experiment for one GPU of 24 GiB, by estimate two hours
  image-toy, ground-toy  a toy that sees: how many squares are red? Where is the red one (the reward is its box's IoU)?
END
  cat <<END
${ours#?}

The papers' runs, written for 8 GPUs of 80 GB, but 1.5b fits one (docs/performance.md). Names alone are explained above.
  1.5b, 7b               SSPO's Table 1 with sspo.py, CW-GRPO's Table 2 with cwgrpo.py, GPG's Table 4 with gpg.py
  1.5b-3k to 7b-10k      SPS's Table 1, 1.5b or 7b with 3k, 5k or 10k problems (sps-k1 to sps-k5: two epochs)
  math, zero             GPG's ablations on MATH-lighteval; DAPO-Math-17k in the recipe of GPG-Zero-7B (Table 9)
  rs1, rs3               GPG-RS1, GPG-RS3 (GPG's Table 3)
  geoqa to lisa          questions about images (GPG's Tables 5 to 8; docs/gpg.md: their data)
${papers#?}
END
}

# -------------------------------------------------------------------------------------------------------------- recipes
declare -A recipes commands own  # flags by "SCRIPT SIZE"; by METHOD-SIZE the whole command, and the method's flags
names=() ours="" papers="" script=""  # every METHOD-SIZE in order; methods as help prints them, small sizes first
recipe() { recipes["$1 $2"]=${*:3}; }  # SCRIPT SIZE FLAGS...: they are split at blanks, so no value may have one

aime24=HuggingFaceH4/aime_2024 aime25=math-ai/aime25 amc23=knoveleng/AMC-23 amc83=AI-MO/aimo-validation-amc
math500=HuggingFaceH4/MATH-500 minerva=knoveleng/Minerva-Math olympiad=knoveleng/OlympiadBench
brumo25=MathArena/brumo_2025 hmmt_feb25=MathArena/hmmt_feb_2025 hmmt_nov25=MathArena/hmmt_nov_2025

toy="--model tools/toy/model --template plain --dataset tools/toy/train.jsonl
  --eval tools/toy/heldout.jsonl,tools/toy/harder.jsonl --eval-samples 8 --eval-temperature 1 --eval-every 40
  --prompts-per-step 32 --max-prompt-tokens 32 --max-response-tokens 96 --lr 2e-4 --steps 120"
if [ $gpus = yes ]; then toy+=" --gpu-memory-utilization 0.1"; fi  # more cache than that only costs time
images=tools/toy-images
toys_of() {  # SCRIPT FLAGS...: the three toys, with what this script needs beside
  recipe $1 toy $toy ${@:2}
  recipe $1 image-toy $toy ${@:2} --model $images/model --image-column image --steps 60 --eval-every 20 \
    --dataset $images/image-train.parquet --eval $images/image-heldout.parquet  # nearly all is right by step 60
  recipe $1 ground-toy $toy ${@:2} --model $images/model --image-column image --reward tools/rewards.py:iou \
    --dataset $images/ground-train.parquet --eval $images/ground-heldout.parquet
}
toys_of sspo.py
toys_of gpg.py
toys_of cwgrpo.py --no-format-reward --group-size 8 --temperature 1 \
  --kl-coef 0.004  # answers without thoughts; docs/cwgrpo.md says why the KL weighs less
toys_of sps.py --rl-steps 40 --irl-batch 256 --subset 0  # three rounds
recipe sps.py image-toy ${recipes[sps.py image-toy]} --rl-steps 20  # three rounds of its 60 steps

# ours: a pretrained model on two CPU cores, in one process, since two reduce 540 MB of gradients for each micro-batch;
# the prompt shows examples of an answer
smollm="--model tools/smollm/model --template tools/smollm.txt --dataset tools/smollm/train.jsonl
  --eval tools/smollm/heldout.jsonl,tools/smollm/harder.jsonl --eval-samples 8 --eval-temperature 1 --eval-every 100
  --prompts-per-step 8 --group-size 8 --max-prompt-tokens 256 --max-response-tokens 48 --steps 12
  --micro-batch-tokens 1024 --temperature 1 --lr 5e-6 --lr-warmup 0 --lr-floor 1 --weight-decay 0.01"
recipe sspo.py 135m $smollm --updates-per-step 2
recipe gpg.py 135m $smollm
recipe cwgrpo.py 135m $smollm --no-format-reward
recipe sps.py 135m $smollm --subset 0 --rl-steps 5 --irl-batch 32 --irl-lr 3e-6  # two rounds, and two steps more

# ours, untried; the reward reads a box, so the chat prompt asks for one; 116 draws of 64 are an epoch
gsm8k="--activation-checkpointing --gpu-memory-utilization 0.5
  --model Qwen/Qwen2.5-0.5B-Instruct --template chat-boxed --dataset openai/gsm8k:main:train
  --eval openai/gsm8k:main:test --eval-every 29 --max-prompt-tokens 512 --max-response-tokens 1024
  --prompts-per-step 64 --steps 116 --temperature 1 --lr 2e-6 --lr-warmup 0 --lr-floor 1 --weight-decay 0.01"
recipe sspo.py 0.5b $gsm8k --lr 1e-6  # four updates a step
recipe gpg.py 0.5b $gsm8k
recipe cwgrpo.py 0.5b $gsm8k --group-size 8 --no-format-reward
recipe sps.py 0.5b $gsm8k --subset 0 --rl-steps 29  # four rounds

sspo="--activation-checkpointing --eval $aime24,$amc83,$math500,$minerva,$olympiad --keep-best
  --dataset data/understand-r1-zero/datasets/train/math_lvl3to5_8k"
recipe sspo.py 1.5b $sspo
recipe sspo.py 7b $sspo --model Qwen/Qwen2.5-Math-7B --alpha 0.15 --gamma 2.2  # these two are read by --clip entropy
sspo+=" --model Qwen/Qwen2.5-Math-1.5B --template qwen-math --steps 200 --prompts-per-step 128 --group-size 8
  --updates-per-step 4 --temperature 1 --max-prompt-tokens 1024 --max-response-tokens 3000 --max-total-tokens 0
  --no-format-reward --lr-warmup 0 --lr-floor 1 --weight-decay 0.01 --checkpoints-kept 2"  # sspo.py's defaults
recipe cwgrpo.py sspo-1.5b $sspo
recipe cwgrpo.py sspo-7b $sspo --model Qwen/Qwen2.5-Math-7B
recipe cwgrpo.py 1.5b --activation-checkpointing
recipe cwgrpo.py 7b --activation-checkpointing --model Qwen/Qwen2.5-Math-7B-Instruct --no-format-reward --steps 150

gpg="--activation-checkpointing --eval $aime24,$amc23,$math500,$minerva,$olympiad"
recipe gpg.py 7b $gpg
qwen7b="--model Qwen/Qwen2.5-Math-7B --template tools/qwen-boxed.txt --weight-decay 0.1"  # gpg.py's defaults
recipe sspo.py zero $gpg $qwen7b --dataset BytedTsinghua-SIA/DAPO-Math-17k \
  --prompts-per-step 144 --steps 1100 --max-response-tokens 3072
# see gpg.py for what is ours; 117 draws of 64 prompts are one epoch of 7,500, a threshold takes more
math="$gpg --dataset DigitalLearningGmbH/MATH-lighteval:train
  --max-prompt-tokens 512 --max-response-tokens 1024 --prompts-per-step 64 --steps 117 --lr 2e-6 --lr-warmup 0.1"
recipe gpg.py math $math
recipe sspo.py math $math $qwen7b --updates-per-step 1
recipe cwgrpo.py math $math $qwen7b --no-format-reward --group-size 8 --temperature 1 --lr-floor 1
for group in 2 4 16; do  # 512 responses a step whatever the group (released code), one epoch
  prompts=$((512 / group))
  recipe gpg.py math-g$group $math --prompts-per-step $prompts --steps $((7500 / prompts))
  recipe gpg.py 0.5b-g$group $gsm8k --prompts-per-step $prompts --steps $((7473 / prompts))
done

# the recipe of Open-RS; its decay is TRL's default
rs="--activation-checkpointing --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --template open-rs --format-reward
  --group-size 6 --prompts-per-step 64 --max-prompt-tokens 512 --max-response-tokens 3584
  --temperature 0.7 --lr-warmup 0.1 --lr-floor 0.1 --weight-decay 0"
recipe gpg.py rs1 $rs --dataset knoveleng/open-s1 --steps 100
recipe gpg.py rs3 $rs --dataset knoveleng/open-rs --steps 50
recipe cwgrpo.py rs1 $rs --dataset knoveleng/open-s1 --steps 100
recipe cwgrpo.py rs3 $rs --dataset knoveleng/open-rs --steps 50

# 16 prompts (8 GPUs, one each, accumulated twice; sat: once) and the steps of the epochs; what the frameworks leave
# open is their trainer's default: 256 tokens, decay 0, a learning rate that falls to 0 (here along a cosine)
sees="--activation-checkpointing --image-column image --max-pixels 401408 --normaliser response --format-reward
  --prompts-per-step 16 --max-prompt-tokens 1024 --max-response-tokens 256 --weight-decay 0 --lr-floor 0"
recipe gpg.py geoqa $sees --model Qwen/Qwen2.5-VL-3B-Instruct --template tools/geoqa.txt \
  --reward tools/rewards.py:geoqa --dataset leonardPKU/GEOQA_R1V_Train_8K --steps 502  # 8,031 / 16
classes="--model Qwen/Qwen2-VL-2B-Instruct --template chat --reward tools/rewards.py:class_name"
recipe gpg.py flower $sees $classes --dataset laolao77/ViRFT_CLS_flower_4_shot --steps 204  # 102 x 4 x 8 epochs / 16
recipe gpg.py pets $sees $classes --dataset laolao77/ViRFT_CLS_pets37_4shot --steps 222  # 37 x 4 x 24 / 16
recipe gpg.py aircraft $sees $classes --dataset laolao77/ViRFT_CLS_fgvc_aircraft_4_shot --steps 200  # 100 x 4 x 8 / 16
recipe gpg.py car $sees $classes --dataset laolao77/ViRFT_CLS_car196_4shot --steps 392  # 196 x 4 x 8 / 16
recipe gpg.py sat $sees --model Qwen/Qwen2-VL-2B --template tools/sat.txt --reward tools/rewards.py:option \
  --max-response-tokens 700 --dataset data/sat.parquet --prompts-per-step 8 --steps 3000  # about 12,000 x 2 / 8
recipe gpg.py lisa $sees --model Qwen/Qwen2-VL-2B-Instruct --template chat --reward tools/rewards.py:iou \
  --dataset data/lisa-train.parquet --steps 498  # 6 epochs end at Visual-RFT's checkpoint-498

sps_sizes="" two_epochs=""
for size in 1.5b-3k 1.5b-5k 1.5b-10k 7b-3k 7b-5k 7b-10k; do
  problems=${size#*-}; problems=${problems%k}000
  sps="--activation-checkpointing --model Qwen/Qwen2.5-Math-${size%b-*}B --subset $problems
    --eval $aime24,$aime25,$brumo25,$hmmt_feb25,$hmmt_nov25
    --eval-samples 128 --eval-temperature 0.7 --eval-every 100 --keep-best"
  recipe sps.py $size $sps
  recipe sps.py $size-two-epochs $sps --steps $((2 * ((problems + 15) / 16)))
  recipe sspo.py $size $sps --dataset Elliott/Openr1-Math-46k-8192 --max-response-tokens 3072 --lr 5e-7 \
    --weight-decay 0.1 --adam-betas 0.9 0.95 --steps 700 --prompts-per-step 16 --updates-per-step 1
  sps_sizes+=" $size" two_epochs+=" $size=$size-two-epochs"
done

# -------------------------------------------------------------------------------------------------------------- methods
methods_of() {  # SCRIPT SIZE[=RECIPE]...: what the methods below have; a size's recipe has its name if none is given
  local size head
  if [ "$1" != "$script" ]; then ours+=$'\n' papers+=$'\n'; fi
  script=$1 sizes=("${@:2}") small="" large=""
  for size in "${sizes[@]%=*}"; do case $size in *toy | 135m | 0.5b) small+=", $size" ;; *) large+=", $size" ;; esac; done
  large=${large/1.5b-3k,*7b-10k/1.5b-3k to 7b-10k}
  head=$'\n'"METHOD of $script, SIZE ${small#, }:"
  if [ -n "$small" ] && [[ $ours != *"$head"* ]]; then ours+=$head; fi
  head=$'\n'"METHOD of $script, SIZE ${large#, }:"
  if [ -n "$large" ] && [[ $papers != *"$head"* ]]; then papers+=$head; fi
}

method() {  # NAME WHAT FLAGS...: a recipe's flags come first, the method's last, where they win; no WHAT: see above
  local size name row=" $1" flags=""
  if [ $# -gt 2 ]; then printf -v flags ' %q' "${@:3}"; fi
  for size in "${sizes[@]}"; do
    name=$1-${size%=*}
    names+=("$name")
    own[$name]=${flags# }
    commands[$name]="$script ${recipes[$script ${size#*=}]}$flags"
  done
  if [ -n "$2" ]; then printf -v row '\n  %-17s%s' "$1" "$2"; fi
  if [ -n "$small" ]; then ours+=$row row=" $1"; fi
  if [ -n "$large" ]; then papers+=$row; fi
}

toys="toy image-toy ground-toy"
methods_of sspo.py $toys 135m 0.5b 1.5b 7b
method sspo "SSPO (Table 1)"
method sir "\"+SIR\": SSPO's ratio, fixed clip 0.2 (ours; Table 2; the \n\n row of Table 3)" --clip fixed
method newline "segments end at \n, fixed clip (inferred; Table 3)" --clip fixed --delimiter '\n'
method period "segments end at \".\", fixed clip (inferred; Table 3)" --clip fixed --delimiter .
method grpo "one ratio per token, clip 0.2 (Table 1)" --clip fixed --delimiter token
method clip-high "GRPO with upper clip 0.28 (Table 1)" --clip fixed --delimiter token --clip-high 0.28
method gspo "one ratio per response, clip 3e-4 / 4e-4 (GSPO's own)" \
  --clip fixed --delimiter '' --clip-low 3e-4 --clip-high 4e-4
method gspo-0.2 "the same, clip 0.2 (Fig. 3b: almost nothing clips); Table 1 has one of the two (docs/sspo.md)" \
  --clip fixed --delimiter ''
drgrpo="--clip fixed --delimiter token --no-scale-advantage --normaliser constant"
method drgrpo "GRPO without std and without length normalisation (Table 1)" $drgrpo
methods_of sspo.py math
method drgrpo "the same as the baseline in GPG's Table 1" $drgrpo
# the values of SPS's Table 2 (arXiv 2604.16995), without SWIFT's filter of overlong responses
dapo="--clip fixed --delimiter token --clip-high 0.28 --normaliser token --valid-share 1"
methods_of sspo.py 1.5b 7b $sps_sizes
method dapo "clip-high, token mean, groups all right or wrong drawn again, penalty over the last 2,048 tokens" \
  $dapo --overlong-buffer 2048
methods_of sspo.py $toys
method dapo "clip-high, token mean, groups all right or wrong drawn again, penalty over the last 32 of 96 tokens" $dapo --overlong-buffer 32
methods_of sspo.py 135m
method dapo "the same, over the last 10 of 48" $dapo --overlong-buffer 10
methods_of sspo.py 0.5b
method dapo "the same, over the last 205 of 1,024" $dapo --overlong-buffer 205
methods_of sspo.py zero  # 10 draws and the penalty over a fifth of the length are those of verl's DAPO
method dapo "the same, over the last 614 of 3,072 (GPG's Table 9)" $dapo --overlong-buffer 614 --max-draws 10
methods_of sspo.py $sps_sizes
method gspo "GSPO as SPS compares with it (SPS's Table 2), four updates a step" --clip fixed --delimiter '' \
  --clip-low 3e-4 --clip-high 4e-4 --prompts-per-step 64 --updates-per-step 4 --steps 175 --eval-every 25

methods_of cwgrpo.py $toys 135m 0.5b 1.5b 7b
method cwgrpo "the Gaussian kernel, KL to the initial model; --detach-kernel: without the gradient through it"
method grpo-kl "weights all 1, the same KL: the paper's GRPO" --reweight none
method clip-cov "Clip-Cov's mask, token mean, the same KL" --reweight clip-cov --normaliser token
methods_of cwgrpo.py 1.5b=sspo-1.5b 7b=sspo-7b
method sspo-clip-cov "CLIP-Cov with SSPO's model, data, lengths and four updates a step, no KL (SSPO's Table 1)" \
  --reweight clip-cov --normaliser token --kl-coef 0
methods_of cwgrpo.py math rs1 rs3
method grpo "GRPO with KL, GPG's baseline in its recipe (math: Tables 1, 15; rs1, rs3: Fig. 3)" --reweight none

methods_of gpg.py $toys 135m 0.5b 7b math rs1 rs3
method gpg "row D of Table 15, recommended: no normalisation, alpha, threshold 0.6 (rs1, rs3: Table 3)"
row_a="--norm group --no-accurate-gradient --beta-th 0"
method gpg-a "row A: std of the group, no alpha, no threshold (Table 13's Group, Table 11's 8, GPG-RS's code)" $row_a
method gpg-b "row B: no normalisation, no alpha, no threshold (Table 13's 1)" --no-accurate-gradient --beta-th 0
method gpg-c "row C: row B with alpha" --beta-th 0
method gpg-group-alpha "row A with alpha (Table 1)" --norm group --beta-th 0
method gpg-beta0.8 "threshold 0.8 (Table 10)" --beta-th 0.8
method gpg-batch "std of the batch, no alpha, no threshold (Table 13)" --norm batch --no-accurate-gradient --beta-th 0
method gpg-kl "row A with KL, of section 3.4's released recipe these two (row D with KL: gpg-math --kl-coef 0.04)" \
  $row_a --kl-coef 0.04
for group in 2 4 16; do
  methods_of gpg.py $toys 7b math=math-g$group 0.5b=0.5b-g$group
  method gpg-g$group "row A, groups of $group (Table 11); math, 0.5b: 512 responses a step" $row_a --group-size $group
done
methods_of gpg.py geoqa flower pets aircraft car sat lisa
method gpg "as released: threshold 0.4, loss per response" --beta-th 0.4
method grpo "its baseline: row A per response with GRPO's KL, which for one update a step is GRPO's gradient" \
  $row_a --kl-coef 0.04

methods_of sps.py $toys 135m 0.5b $sps_sizes
method sps "as printed; the IRL stage's learning rate of 5e-10 hardly moves a weight (135m: 3e-6, ours, does)"
method sps-grpo "without IRL stages" --irl-steps 0
passes="--irl-steps 0 --irl-passes 1"
methods_of sps.py $toys
method sps-act "with an IRL learning rate at which the stage acts (ours): 3e-4, of all but toys 5e-7" --irl-lr 3e-4
method sps-uniform "the same, demonstrations drawn at random (section 4.1)" --irl-lr 3e-4 --choose uniform
method sps-quantile "the same, demonstrations from a step's lower 3/8 (C.1; 3/8 is ours)" --irl-lr 3e-4 --choose quantile
for k in 1 2 3 4 5; do
  method sps-k$k "the same, $k of each prompt's responses, all used (Fig. 4)" --irl-lr 3e-4 --demonstrations $k $passes
done
methods_of sps.py 0.5b $sps_sizes
method sps-act "" --irl-lr 5e-7
method sps-uniform "" --irl-lr 5e-7 --choose uniform
method sps-quantile "" --irl-lr 5e-7 --choose quantile
methods_of sps.py 0.5b $two_epochs
for k in 1 2 3 4 5; do method sps-k$k "" --irl-lr 5e-7 --demonstrations $k $passes; done

# --------------------------------------------------------------------------------------------------------------- set-up
once() {  # FILE COMMAND...: make what is not there, or wait for another run.sh that makes it
  if [ -e "$1" ]; then return; fi
  (
    flock --nonblock 9 || { echo "another run.sh is setting up: waiting for it"; flock 9; }
    if [ ! -e "$1" ]; then "${@:2}"; fi
  ) 9<.
}

setup() {
  local requirements=requirements-cpu.txt
  if [ $gpus = yes ]; then requirements=requirements-gpu.txt; fi
  local ready; ready=$venv/ready-$(cksum <"$requirements" | cut -d' ' -f1)
  once "$ready" install "$requirements" "$ready"
  check_gpus
}

install() {  # a file of requirements, and the file that says it is done
  local requirements=$1 ready=$2
  local found="" candidate
  for candidate in python3 python3.12 python3.13 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$candidate; break; fi
  done
  if [ -z "$found" ]; then echo "run.sh needs Python 3.11 or later" >&2; exit 1; fi
  echo "setting up $venv from $requirements (once, some minutes)"
  "$found" -m venv $venv
  local wheels=()
  if [ "$requirements" = requirements-cpu.txt ]; then
    local index=https://download.pytorch.org/whl/cpu  # PyTorch's own CPU builds, much smaller, where it answers
    if "$python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
      wheels=(--extra-index-url "$index")
    fi
    "$python" -m pip install -q --disable-pip-version-check "${wheels[@]}" torch==2.13.0
  fi
  "$python" -m pip install -q --disable-pip-version-check "${wheels[@]}" -r "$requirements"
  if ! "$python" -c 'import torchaudio, torchvision' 2>/dev/null; then  # builds for CUDA, which break `import transformers`
    "$python" -m pip uninstall -q -y torchaudio torchcodec
    # images need torchvision's Python part: of what only its compiled part has, it guards all but these two (nms, qnms)
    sed -i 's/^@torch.library.register_fake("torchvision::\(q*nms\)")$/@register_meta("\1")/' \
      $venv/lib/python3*/site-packages/torchvision/_meta_registrations.py || true
    if ! "$python" -c 'import torchvision' 2>/dev/null; then "$python" -m pip uninstall -q -y torchvision; fi
  fi
  touch "$ready"
}

check_gpus() {  # else an old driver shows as CPU ranks whose engine looks for GPUs
  if [ $gpus = no ]; then return; fi
  local reason driver
  if reason=$("$python" -W ignore -c 'import torch; torch.cuda.init()' 2>&1); then return; fi
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader)
  driver=${driver%%$'\n'*}
  cat >&2 <<END
run.sh: nvidia-smi sees GPUs, but PyTorch cannot use them: $(tail -n 1 <<<"$reason")
The driver is $driver; torch and vllm come with CUDA 13, which needs 580 or later. Update the driver, or leave the
GPUs unused: CPU=1 ./run.sh ... (If the driver is new enough, see whether CUDA_VISIBLE_DEVICES hides the GPUs.)
END
  exit 1
}

launch() {  # a rank for each GPU, else CPU processes that share the cores; no shell stays, so that signals reach it
  local ranks; ranks=$("$python" -c "import torch; print(torch.cuda.device_count() or $processes)")
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((ranks - 1 + $(nproc)) / ranks))} TORCH_CPP_LOG_LEVEL=ERROR
  case " $* " in *" --help "*) exec "$python" "$1" --help ;; esac
  printf 'torchrun --nproc-per-node %s' "$ranks"
  printf ' %q' "$@"
  echo
  # a run that is stopped ends at once, and leaves its semaphores
  export PYTHONWARNINGS=ignore::UserWarning:multiprocessing.resource_tracker LOGLEVEL=${LOGLEVEL:-ERROR}
  exec "$python" -c "$torchrun" --nproc-per-node "$ranks" "$@"
}

torchrun='  # without its traceback where Ctrl-C or a SIGTERM ends it: the script has said what there is to say
import logging, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
logging.getLogger("torch.distributed.elastic").setLevel("ERROR")
try:
    main()
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
'

data() {  # MATH levels 3-5 as Dr. GRPO and SSPO used it
  once data/understand-r1-zero/datasets/train/math_lvl3to5_8k fetch understand-r1-zero
}

fetch() {  # a repository of Dr. GRPO's authors, whole or not at all
  rm -rf "data/$1.partial"
  git clone --depth 1 "https://github.com/sail-sg/$1" "data/$1.partial"
  rm -rf "data/$1"  # an interrupted clone
  mv "data/$1.partial" "data/$1"
}

start() {  # EXPERIMENT ARGS...
  local words; eval "words=(${commands[$1]})"  # they are quoted for the shell, since a flag's value may be empty
  words=("${SCRIPT:-${words[0]}}" "${words[@]:1}" "${@:2}")
  if [ ! -f "${SCRIPT:-run.sh}" ]; then echo "run.sh: SCRIPT=$SCRIPT: no such file in $PWD" >&2; exit 2; fi
  if [ -n "${DRY:-}" ]; then printf '%q ' "${words[@]}"; echo; exit; fi
  local fork=${SCRIPT:-}; fork=${fork##*/}
  export EXPERIMENT=${fork:+${fork%.py}-}$1  # a run's folder is named after it
  if [[ ${words[*]} == *" data/understand-r1-zero/"* ]]; then data; fi
  setup
  case " ${words[*]} " in
    *" $images/model "*) once $images/model/model.safetensors "$python" tools/toy_images.py ;;
    *" tools/smollm/model "*) processes=1; once tools/smollm/model/model.safetensors "$python" tools/smollm.py ;;
  esac
  launch "${words[@]}"
}

unknown() {  # says which names are nearest, if there is a python3 to find them
  local near find='import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 4), sep=", ")'
  near=$(python3 -c "$find" "$1" "${names[@]}" 2>/dev/null) || near=""
  echo "run.sh: no experiment or command has the name $1.${near:+ The nearest are $near.} ./run.sh help lists all." >&2
  exit 2
}

theirs() {  # WORDS...: into `given`; what exists where the user stands is the user's, though this runs in another folder
  local word part flag list
  given=()
  for word in "$@"; do
    [[ $word =~ ^(--[a-z-]+=)?(.*)$ ]]; flag=${BASH_REMATCH[1]} list=""
    while IFS= read -rd, part; do  # a list of sets has commas, FILE.py:FUNCTION and folder:split a colon
      if [[ $part == [!-/0-9]* && -e $here/${part%%:*} ]]; then part=$here/$part; fi
      list+=,$part
    done <<<"${BASH_REMATCH[2]},"
    given+=("$flag${list#,}")
  done
}

word=${1:-default}
[ $# -eq 0 ] || shift
if [ "$here" != "$PWD" ]; then theirs "$@"; set -- "${given[@]}"; fi
case $word in
  help | -h | --help) help ;;
  list) for name in "${names[@]}"; do printf '%s\t%s\t%s\n' "$name" "${commands[$name]%% *}" "${own[$name]}"; done ;;
  setup) setup ;;
  data) data; echo "fetched  data/understand-r1-zero/datasets/train/math_lvl3to5_8k" ;;
  test) setup; exec "$python" -m pytest "$@" ;;
  eval) setup; launch tools/eval.py "$@" ;;
  check) setup; exec "$python" tools/check.py "$@" ;;
  plot) setup; exec "$python" tools/plot.py "$@" ;;
  sweep | table) setup; exec "$python" tools/sweep.py "$word" "$@" ;;
  claims) setup; PROCESSES=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$python" tools/claims.py "$@" ;;
  default)
    if [ -n "${DRY:-}" ]; then start sspo-toy; fi
    run=runs/sspo-toy-$(date +%Y%m%d-%H%M%S)
    mkdir -p runs && mkdir "$run" 2>/dev/null || run+=-$$  # another started in this second
    (start sspo-toy --run-dir "$run")
    "$python" tools/plot.py "$run" -o "$run/curve.png"
    "$python" tools/plot.py "$run" --figure tokens -o "$run/tokens.html"
    printf '%s\n' "samples  $run/samples/" "model    $run/model/" ;;
  *) if [ -n "${commands[$word]:-}" ]; then start "$word" "$@"; else unknown "$word"; fi ;;
esac
