#!/usr/bin/env bash
# Sets everything up in .venv, and holds the exact command of every experiment. `./run.sh help` lists them.
set -euo pipefail
cd "$(dirname "$0")"
if [ "${1:-}" = test ]; then CPU=1; fi  # the tests are exact in float32: they are of the path without GPUs
gpus=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then gpus=yes; fi
venv=.venv
if [ -n "${CPU:-}" ]; then
  export CUDA_VISIBLE_DEVICES=
  if [ $gpus = yes ]; then venv=.venv-cpu gpus=no; fi
fi
python=$venv/bin/python

help() {
  cat <<'END'
./run.sh                     set up, then train SSPO on the embedded default (no weights to download; minutes on 2 CPU cores)
./run.sh test [ARGS]         set up, then run the tests (arguments go to pytest)
./run.sh setup               set up only
./run.sh EXPERIMENT [ARGS]   set up, then run EXPERIMENT; arguments go to the script, e.g. --seed 2 --steps 500
./run.sh check [MODEL]       check a new machine in ten minutes: a table of figures, bounds, ok or FAIL
./run.sh eval MODEL [ARGS]   a hub id, model folder or run folder by the papers' protocols (docs/evaluation.md)
./run.sh plot RUN... [-o F]  draw the curves of run folders into one picture
./run.sh claims [NAME...]    run what docs/claims.md reports, five seeds each, or go on with it; tables and pictures
CPU=1 ./run.sh ...           without GPUs, even where there are some
DRY=1 ./run.sh EXPERIMENT    print the script and its flags, and do nothing
./run.sh help                this text; `./run.sh sspo-toy --help` lists the script's flags

EXPERIMENT is METHOD-SIZE. SIZE toy is the embedded default; 0.5b, Qwen2.5-0.5B-Instruct on GSM8K, is a first experiment for
one GPU of 24 GiB, in some two hours by estimate; the others are the papers' runs, written for 8 GPUs of 80 GB, but 1.5b fits
one (docs/performance.md). All but toy download model and data.
METHOD of sspo.py, SIZE 0.5b, 1.5b, 7b or toy:
  sspo         SSPO (Table 1)
  sir          "+SIR": SSPO's ratio, fixed clip 0.2 (Table 2; the \n\n row of Table 3)
  newline      segments end at \n, fixed clip (Table 3)
  period       segments end at ".", fixed clip (Table 3)
  grpo         one ratio per token, clip 0.2
  clip-high    GRPO with upper clip 0.28
  gspo         one ratio per response, clip 3e-4 / 4e-4 (GSPO's own)
  gspo-0.2     one ratio per response, clip 0.2 (Fig. 3b of the SSPO paper: almost nothing clips); which of the two
               Table 1's row is the paper leaves open (docs/sspo.md)
  drgrpo       GRPO without std and without length normalisation
  dapo         clip-high, token mean over the update, groups all right or all wrong drawn again, soft overlong penalty
               (as SPS, arXiv 2604.16995, compares with it)
METHOD of cwgrpo.py, SIZE 0.5b, 1.5b, 7b (Table 2) or toy:
  cwgrpo       the Gaussian kernel, KL to the initial model; --detach-kernel: without the gradient through it
  grpo-kl      weights all 1, the same KL: the paper's GRPO
  clip-cov     Clip-Cov's mask, token mean, the same KL
METHOD of cwgrpo.py, SIZE 1.5b or 7b (as SSPO's, its Table 1):
  sspo-clip-cov     CLIP-Cov with SSPO's model, data, lengths and four updates a step, no KL
METHOD of gpg.py, SIZE 7b (GPG-Zero-7B, Table 4), rs1, rs3 (GPG-RS1, GPG-RS3, Table 3), math (MATH-lighteval, the ablations),
0.5b or toy:
  gpg          as the paper recommends: no normalisation, alpha, threshold 0.6 (row D of Table 15); gpg-rs1, gpg-rs3 are
               thus the paper's GPG in GPG-RS's recipe
  gpg-a        row A: standard deviation of the group, no alpha, no threshold (also Table 13's "Group", Table 11's 8);
               gpg-a-rs1, gpg-a-rs3 are thus GPG-RS as its released code has it
  gpg-b        row B: no normalisation, no alpha, no threshold (also Table 13's "1")
  gpg-c        row C: row B with alpha
  gpg-group-alpha   row A with alpha (Table 1)
  gpg-beta0.8  threshold 0.8 (Table 10)
  gpg-batch    standard deviation of the batch, no alpha, no threshold (Table 13)
  gpg-kl       row D with a KL of weight 0.04 (section 3.4 adds it to "our method"; on another row: gpg-b-math --kl-coef 0.04)
  gpg-g2, gpg-g4, gpg-g16   row A with groups of 2, 4, 16 (Table 11); math, 0.5b: 512 responses a step whatever the group
METHOD of cwgrpo.py, SIZE math, rs1, rs3 (gpg.py's baselines, its recipes):
  grpo         GRPO with KL (math: Tables 1, 15; rs1, rs3: Fig. 3)
METHOD of gpg.py, SIZE geoqa (Table 5), flower, pets, aircraft, car (Table 6), sat (Table 7) or lisa (Table 8):
  gpg          on questions about images, as released: threshold 0.4, loss per response (docs/gpg.md: its data)
  grpo         its baseline: row A per response with GRPO's KL, which for one update a step is GRPO's gradient
METHOD of sspo.py, SIZE math (likewise):
  drgrpo       Dr. GRPO (Table 1)
METHOD of sspo.py, SIZE zero (likewise, DAPO-Math-17k):
  dapo         DAPO for 1,100 steps (Table 9)
METHOD of sps.py, SIZE 1.5b-3k, 1.5b-5k, 1.5b-10k, 7b-3k, 7b-5k, 7b-10k (model and problems of Table 1), 0.5b or toy:
  sps          as printed; the IRL stage's learning rate of 5e-10 hardly moves a weight
  sps-act      with an IRL learning rate at which the stage acts (ours): 5e-7; 3e-4 for toy
  sps-grpo     without IRL stages
  sps-uniform, sps-quantile     other choices of demonstrations (sections 4.1, C.1), acting as sps-act
  sps-k1, sps-k2, sps-k3, sps-k4, sps-k5  1 to 5 demonstrations of each prompt, all used (Fig. 4; k sizes: two epochs)
METHOD of sspo.py, SIZE 1.5b-3k, 1.5b-5k, 1.5b-10k, 7b-3k, 7b-5k, 7b-10k:
  dapo, gspo   Table 2's of SPS
SIZE image-toy or ground-toy, of every METHOD that has toy: a toy that sees, made at first use
  gpg-image-toy     how many squares are red? (tools/toy_images.py)
  gpg-ground-toy    where is the red square? The reward is the IoU of its box
END
}

setup() {
  local requirements=requirements-cpu.txt
  if [ $gpus = yes ]; then requirements=requirements-gpu.txt; fi
  local ready; ready=$venv/ready-$(cksum <"$requirements" | cut -d' ' -f1)
  if [ ! -f "$ready" ]; then install "$requirements" "$ready"; fi
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
  if ! "$python" -c 'import torchvision' 2>/dev/null; then  # builds for CUDA, which break `import transformers`
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

launch() {  # all GPUs if there are some, otherwise 2 CPU processes; instead of this shell, so that signals reach torchrun
  local ranks; ranks=$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((ranks - 1 + $(nproc)) / ranks))} TORCH_CPP_LOG_LEVEL=ERROR
  case " $* " in *" --help "*) exec "$python" "$1" --help ;; esac
  printf 'torchrun --nproc-per-node %s' "$ranks"
  printf ' %q' "$@"
  echo
  exec "$python" -m torch.distributed.run --nproc-per-node "$ranks" "$@"
}

method() {  # the script and the flags that make it this method
  script=sspo.py
  case $1 in gpg*) script=gpg.py ;; cwgrpo | grpo-kl | clip-cov) script=cwgrpo.py ;; sps*) script=sps.py ;; esac
  case $1 in
    sspo) flags=() ;;
    sir) flags=(--clip fixed) ;;
    newline) flags=(--clip fixed --delimiter '\n') ;;
    period) flags=(--clip fixed --delimiter .) ;;
    grpo) flags=(--clip fixed --delimiter token) ;;
    clip-high) flags=(--clip fixed --delimiter token --clip-high 0.28) ;;
    gspo) flags=(--clip fixed --delimiter '' --clip-low 3e-4 --clip-high 4e-4) ;;
    gspo-0.2) flags=(--clip fixed --delimiter '') ;;
    drgrpo) flags=(--clip fixed --delimiter token --no-scale-advantage --normaliser constant) ;;
    dapo) flags=(--clip fixed --delimiter token --clip-high 0.28 --normaliser token --valid-share 1
      --overlong-buffer 2048) ;;
    cwgrpo) flags=() ;;
    grpo-kl) flags=(--reweight none) ;;
    clip-cov) flags=(--reweight clip-cov --normaliser token) ;;
    gpg) flags=() ;;
    gpg-a) flags=(--norm group --no-accurate-gradient --beta-th 0) ;;
    gpg-b) flags=(--no-accurate-gradient --beta-th 0) ;;
    gpg-c) flags=(--beta-th 0) ;;
    gpg-group-alpha) flags=(--norm group --beta-th 0) ;;
    gpg-beta0.8) flags=(--beta-th 0.8) ;;
    gpg-batch) flags=(--norm batch --no-accurate-gradient --beta-th 0) ;;
    gpg-kl) flags=(--kl-coef 0.04) ;;
    gpg-g2 | gpg-g4 | gpg-g16) flags=(--norm group --no-accurate-gradient --beta-th 0 --group-size "${1#gpg-g}") ;;
    sps) flags=() ;;
    sps-grpo) flags=(--irl-steps 0) ;;
    sps-act) flags=(--irl-lr 5e-7) ;;
    sps-uniform | sps-quantile) flags=(--irl-lr 5e-7 --choose "${1#sps-}") ;;
    sps-k[1-5]) flags=(--irl-lr 5e-7 --demonstrations "${1#sps-k}" --irl-steps 0 --irl-passes 1) ;;
    *) echo "no such experiment; ./run.sh help lists them" >&2; exit 2 ;;
  esac
}

sets() {  # hub ids of evaluation sets, as --eval takes them
  local name ids=""
  for name in "$@"; do
    case $name in
      aime24) ids+=,HuggingFaceH4/aime_2024 ;;
      aime25) ids+=,math-ai/aime25 ;;
      amc23) ids+=,knoveleng/AMC-23 ;;
      amc83) ids+=,AI-MO/aimo-validation-amc ;;
      math500) ids+=,HuggingFaceH4/MATH-500 ;;
      minerva) ids+=,knoveleng/Minerva-Math ;;
      olympiad) ids+=,knoveleng/OlympiadBench ;;
      *) ids+=,MathArena/$name ;;
    esac
  done
  echo "${ids#,}"
}

responses_512() {  # gpg-gGROUP, rows of data: as many responses a step whatever the group (released code), one epoch
  local group=${1#gpg-g}
  echo --prompts-per-step $((512 / group)) --steps $(($2 * group / 512))
}

size() {  # model, data and evaluation
  case $script-$1 in
    *-toy) flags+=(--model tools/toy/model --template plain --dataset tools/toy/train.jsonl
      --eval tools/toy/heldout.jsonl,tools/toy/harder.jsonl --eval-samples 8 --eval-temperature 1 --eval-every 40
      --prompts-per-step 32 --max-prompt-tokens 32 --max-response-tokens 96 --lr 2e-4 --steps 120)
      if [ $script = cwgrpo.py ]; then  # answers without thoughts; docs/cwgrpo.md says why the KL weighs less
        flags+=(--no-format-reward --group-size 8 --temperature 1 --kl-coef 0.004)
      fi
      if [ $script = sps.py ]; then  # three rounds
        flags+=(--rl-steps 40 --irl-batch 256 --subset 0)
        case $word in sps-toy | sps-grpo-toy) ;; *) flags+=(--irl-lr 3e-4) ;; esac
      fi
      if [ "$word" = dapo-toy ]; then flags+=(--overlong-buffer 32); fi
      if [ $gpus = yes ]; then flags+=(--gpu-memory-utilization 0.1); fi ;;  # more cache than that only costs time
    *-0.5b)  # ours, untried; the reward reads a box, so the chat prompt asks for one; 116 draws of 64 are an epoch
      flags+=(--activation-checkpointing --gpu-memory-utilization 0.5
        --model Qwen/Qwen2.5-0.5B-Instruct --template chat-boxed --dataset openai/gsm8k:main:train
        --eval openai/gsm8k:main:test --eval-every 29 --max-prompt-tokens 512 --max-response-tokens 1024
        --prompts-per-step 64 --steps 116 --temperature 1 --lr 2e-6 --lr-warmup 0 --lr-floor 1 --weight-decay 0.01)
      case $script in
        sspo.py) flags+=(--lr 1e-6) ;;  # four updates a step
        cwgrpo.py) flags+=(--group-size 8 --no-format-reward) ;;
        sps.py) flags+=(--subset 0 --rl-steps 29) ;;  # four rounds
      esac
      case $word in
        dapo-*) flags+=(--overlong-buffer 205) ;;
        gpg-g[0-9]*) flags+=($(responses_512 "${word%-*}" 7473)) ;;
      esac ;;
    sspo.py-1.5b | sspo.py-7b | cwgrpo.py-sspo-1.5b | cwgrpo.py-sspo-7b)
      flags+=(--activation-checkpointing --eval "$(sets aime24 amc83 math500 minerva olympiad)" --keep-best)
      if [ $script = cwgrpo.py ]; then  # what sspo.py has by default
        flags+=(--model Qwen/Qwen2.5-Math-1.5B --template qwen-math --steps 200 --prompts-per-step 128 --group-size 8
          --dataset data/understand-r1-zero/datasets/train/math_lvl3to5_8k --updates-per-step 4 --temperature 1
          --max-prompt-tokens 1024 --max-response-tokens 3000 --max-total-tokens 0 --no-format-reward --kl-coef 0
          --lr-warmup 0 --lr-floor 1 --weight-decay 0.01 --checkpoints-kept 2)
      fi
      case $script-$1 in
        sspo.py-7b) flags+=(--model Qwen/Qwen2.5-Math-7B --alpha 0.15 --gamma 2.2) ;;
        *-7b) flags+=(--model Qwen/Qwen2.5-Math-7B) ;;
      esac
      if [ -z "${DRY:-}" ] && [ ! -d data/understand-r1-zero ]; then  # MATH levels 3-5 as Dr. GRPO and SSPO used it
        git clone --depth 1 https://github.com/sail-sg/understand-r1-zero data/understand-r1-zero
      fi ;;
    cwgrpo.py-1.5b | cwgrpo.py-7b)
      flags+=(--activation-checkpointing)
      if [ "$1" = 7b ]; then flags+=(--model Qwen/Qwen2.5-Math-7B-Instruct --no-format-reward --steps 150); fi ;;
    gpg.py-7b) flags+=(--activation-checkpointing --eval "$(sets aime24 amc23 math500 minerva olympiad)") ;;
    gpg.py-math | cwgrpo.py-math | sspo.py-math)
      # see gpg.py for what is ours; 117 draws of 64 prompts are one epoch of 7,500, a threshold takes more
      flags+=(--activation-checkpointing --eval "$(sets aime24 amc23 math500 minerva olympiad)"
        --dataset DigitalLearningGmbH/MATH-lighteval:train
        --max-prompt-tokens 512 --max-response-tokens 1024 --prompts-per-step 64 --steps 117 --lr 2e-6 --lr-warmup 0.1)
      case $word in
        gpg-g[0-9]*) flags+=($(responses_512 "${word%-*}" 7500)) ;;
      esac
      if [ $script != gpg.py ]; then
        flags+=(--model Qwen/Qwen2.5-Math-7B --template tools/qwen-boxed.txt --weight-decay 0.1)
      fi
      if [ $script = cwgrpo.py ]; then flags+=(--no-format-reward --group-size 8 --temperature 1 --lr-floor 1); fi
      if [ $script = sspo.py ]; then flags+=(--updates-per-step 1); fi ;;
    sspo.py-zero)  # GPG-Zero-7B's recipe; 10 draws and the penalty over a fifth of the length are those of verl's DAPO
      flags+=(--activation-checkpointing --eval "$(sets aime24 amc23 math500 minerva olympiad)"
        --model Qwen/Qwen2.5-Math-7B --template tools/qwen-boxed.txt --dataset BytedTsinghua-SIA/DAPO-Math-17k
        --prompts-per-step 144 --steps 1100 --max-response-tokens 3072 --weight-decay 0.1
        --max-draws 10 --overlong-buffer 614) ;;
    gpg.py-rs[13] | cwgrpo.py-rs[13])  # the recipe of Open-RS; its decay is TRL's default
      flags+=(--activation-checkpointing --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --template open-rs
        --format-reward --group-size 6 --prompts-per-step 64 --max-prompt-tokens 512 --max-response-tokens 3584
        --temperature 0.7 --lr-warmup 0.1 --lr-floor 0.1 --weight-decay 0)
      if [ "$1" = rs1 ]; then flags+=(--dataset knoveleng/open-s1 --steps 100); fi
      if [ "$1" = rs3 ]; then flags+=(--dataset knoveleng/open-rs --steps 50); fi ;;
    gpg.py-geoqa | gpg.py-flower | gpg.py-pets | gpg.py-aircraft | gpg.py-car | gpg.py-sat | gpg.py-lisa)
      # 16 prompts (8 GPUs, one each, accumulated twice) and the steps that epochs make of them; what the frameworks leave
      # open is their trainer's default: 256 tokens, decay 0, a learning rate that falls to 0 (here along a cosine)
      flags+=(--activation-checkpointing --image-column image --max-pixels 401408 --normaliser response --format-reward
        --prompts-per-step 16 --max-prompt-tokens 1024 --max-response-tokens 256 --weight-decay 0 --lr-floor 0)
      if [ "$word" = "gpg-$1" ]; then flags+=(--beta-th 0.4); fi
      case $1 in
        geoqa) flags+=(--steps 502 --dataset leonardPKU/GEOQA_R1V_Train_8K) ;;  # 8,031 / 16
        flower) flags+=(--steps 204 --dataset laolao77/ViRFT_CLS_flower_4_shot) ;;  # 102 x 4 x 8 epochs / 16
        pets) flags+=(--steps 222 --dataset laolao77/ViRFT_CLS_pets37_4shot) ;;  # 37 x 4 x 24 / 16
        aircraft) flags+=(--steps 200 --dataset laolao77/ViRFT_CLS_fgvc_aircraft_4_shot) ;;  # 100 x 4 x 8 / 16
        car) flags+=(--steps 392 --dataset laolao77/ViRFT_CLS_car196_4shot) ;;  # 196 x 4 x 8 / 16
        sat) flags+=(--steps 1500 --dataset data/sat.parquet) ;;  # about 12,000 x 2 / 16
        lisa) flags+=(--steps 498 --dataset data/lisa-train.parquet) ;;  # 6 epochs end at Visual-RFT's checkpoint-498
      esac
      case $1 in
        geoqa) flags+=(--model Qwen/Qwen2.5-VL-3B-Instruct --template tools/geoqa.txt --reward tools/rewards.py:geoqa) ;;
        sat) flags+=(--model Qwen/Qwen2-VL-2B --template tools/sat.txt --reward tools/rewards.py:option
          --max-response-tokens 700) ;;
        lisa) flags+=(--model Qwen/Qwen2-VL-2B-Instruct --template chat --reward tools/rewards.py:iou) ;;
        *) flags+=(--model Qwen/Qwen2-VL-2B-Instruct --template chat --reward tools/rewards.py:class_name) ;;
      esac ;;
    sps.py-*-*k | sspo.py-*-*k)
      local subset; subset=$(sed 's/.*-//; s/k$/000/' <<<"$1")
      flags+=(--activation-checkpointing --model "Qwen/Qwen2.5-Math-$(tr b B <<<"${1%-*}")" --subset "$subset"
        --eval "$(sets aime24 aime25 brumo_2025 hmmt_feb_2025 hmmt_nov_2025)"
        --eval-samples 128 --eval-temperature 0.7 --eval-every 100 --keep-best)
      if [ $script = sspo.py ]; then
        flags+=(--dataset Elliott/Openr1-Math-46k-8192 --max-response-tokens 3072 --lr 5e-7 --weight-decay 0.1
          --adam-betas 0.9 0.95 --steps 700 --prompts-per-step 16 --updates-per-step 1)
        case $word in gspo*) flags+=(--prompts-per-step 64 --updates-per-step 4 --steps 175 --eval-every 25) ;; esac
      fi
      case $word in sps-k*) flags+=(--steps $((2 * ((subset + 15) / 16)))) ;; esac ;;
    *) echo "no such experiment; ./run.sh help lists them" >&2; exit 2 ;;
  esac
}

squares() {  # image or ground, on which the toy that sees is made at first use
  local toy=tools/toy-images
  flags+=(--model $toy/model --dataset "$toy/$1-train.parquet" --eval "$toy/$1-heldout.parquet" --image-column image)
  case $1 in
    image)
      flags+=(--steps 60 --eval-every 20)  # nearly all is right by then
      if [ $script = sps.py ]; then flags+=(--rl-steps 20); fi ;;
    ground) flags+=(--reward tools/rewards.py:iou) ;;
  esac
  if [ -z "${DRY:-}" ] && [ ! -f $toy/model/model.safetensors ]; then setup; "$python" tools/toy_images.py; fi
}

start() {
  if [ -n "${DRY:-}" ]; then printf '%q ' "$script" "${flags[@]}" "$@"; echo; exit; fi
  setup
  launch $script "${flags[@]}" "$@"
}

word=${1:-default}
[ $# -eq 0 ] || shift
case $word in
  help | -h | --help) help ;;
  setup) setup ;;
  test) setup; exec "$python" -m pytest "$@" ;;
  eval) setup; launch tools/eval.py "$@" ;;
  check) setup; exec "$python" tools/check.py "$@" ;;
  plot) setup; exec "$python" tools/plot.py "$@" ;;
  claims) setup; exec "$python" tools/claims.py "$@" ;;
  default)
    method sspo; size toy; setup
    run=runs/sspo-toy-$(date +%Y%m%d-%H%M%S)
    (launch sspo.py "${flags[@]}" --run-dir "$run")
    "$python" tools/plot.py "$run" -o "$run/curve.png"
    echo "samples  $run/samples/"
    echo "model    $run/model/" ;;
  *-image-toy | *-ground-toy)
    kind=${word%-toy}; kind=${kind##*-}; word=${word%-"$kind"-toy}-toy
    method "${word%-toy}"; size toy; squares "$kind"; start "$@" ;;
  *-*-*[0-9]k) size=${word##*-}; rest=${word%-*}; method "${rest%-*}"; size "${rest##*-}-$size"; start "$@" ;;
  grpo-math | grpo-rs[13]) method grpo-kl; size "${word#grpo-}"; start "$@" ;;
  grpo-geoqa | grpo-flower | grpo-pets | grpo-aircraft | grpo-car | grpo-sat | grpo-lisa)
    method gpg-a; flags+=(--kl-coef 0.04); size "${word#grpo-}"; start "$@" ;;
  sspo-clip-cov-*) method clip-cov; size "sspo-${word##*-}"; start "$@" ;;
  *) method "${word%-*}"; size "${word##*-}"; start "$@" ;;
esac
