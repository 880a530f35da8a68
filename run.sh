#!/usr/bin/env bash
# ./run.sh                        set up, train SSPO on a toy (minutes on 2 CPU cores), draw two pictures
# ./run.sh METHOD-SIZE [FLAGS]    set up, run an experiment of the tables; FLAGS win. Begin with
#                                 toy, 135m (pretrained, 2 CPU cores) or 0.5b (one GPU); the papers' are for 8 GPUs
# ./run.sh list|setup|data        every experiment with its whole command; set up; fetch sspo.py's data
# ./run.sh test|prove|eval|plot|why|sweep|table|claims [ARGS]    --help explains each
# CPU=1: without GPUs, in PROCESSES=2. GPU=1: as if GPUs were seen. DRY=1: print the command. SCRIPT=mine.py: a fork.
set -euo pipefail
here=$PWD machine=cpu venv=.venv wrong=
cd "$(dirname "$(readlink -f "$0")")"
if [[ ${1:-} = @(test|prove) ]]; then CPU=1; fi  # exact in float32
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=none
case ${CPU:+cpu}${GPU:+gpu}$driver in
  cpu*) export CUDA_VISIBLE_DEVICES= ;;
  gpu* | 5[89]?.* | [6-9]??.*) machine=gpu venv=.venv-gpu ;;
  none) if [ -e /dev/nvidiactl ]; then wrong="/dev/nvidiactl is there, but nvidia-smi does not work"; fi ;;
  *) wrong="the GPU's driver is $driver, not 580 or later" ;;
esac
python=$venv/bin/python
names=(
  {sspo,sir,newline,period,grpo,clip-high,gspo,gspo-0.2,drgrpo,dapo,cwgrpo,grpo-kl,clip-cov}-{toy,135m,0.5b,1.5b,7b}
  {dapo,gspo}-{1.5b,7b}-{3k,5k,10k} dapo-zero drgrpo-math grpo-{math,rs1,rs3} sspo-clip-cov-{1.5b,7b}
  gpg{,-a,-b,-c,-group-alpha,-beta0.8,-batch,-kl}-{toy,135m,0.5b,7b,math,rs1,rs3} gpg-g{2,4,16}-{toy,0.5b,7b,math}
  {gpg,gpg-a,gpg-b,gpg-c,grpo}-{image,ground}-toy {gpg,grpo}-{geoqa,flower,pets,aircraft,car,sat,lisa}
  sps{,-grpo}-135m sps{,-grpo,-act,-uniform,-quantile,-k{1..5}}-{toy,0.5b,{1.5b,7b}-{3k,5k,10k}}
)

# ------------------------------------------------------------- methods: script and flags, by the first row that fits
grpo="sspo.py --clip=fixed --delimiter=token"
dapo="$grpo --clip-high=0.28 --normaliser=token --valid-share=1 --overlong-buffer"
gspo="sspo.py --clip=fixed --delimiter= --clip-low=3e-4 --clip-high=4e-4"
row_a="gpg.py --norm=group --no-accurate-gradient --beta-th=0"
method() {  # METHOD-SIZE: into `script` and `own`, into `group` GPG's responses to a prompt
  group=8 k=${1#sps-k} act="sps.py --irl-lr=5e-7"  # at these rates the IRL stage acts (ours)
  if [[ $1 == *-toy ]]; then act="sps.py --irl-lr=3e-4"; fi
  case $1 in
    sspo-clip-cov-*) method="cwgrpo.py --reweight=clip-cov --normaliser=token --kl-coef=0" ;;  # CLIP-Cov of SSPO
    sspo-*) method=sspo.py ;;  # SSPO (Table 1)
    sir-*) method="sspo.py --clip=fixed" ;;  # "+SIR": fixed clip 0.2 (ours; Table 2, \n\n of Table 3)
    newline-*) method="sspo.py --clip=fixed --delimiter=\n" ;;  # segments end at \n (inferred; Table 3)
    period-*) method="sspo.py --clip=fixed --delimiter=." ;;  # segments end at "." (inferred; Table 3)
    clip-high-*) method="$grpo --clip-high=0.28" ;;  # GRPO with upper clip 0.28 (Table 1)
    gspo-0.2-*) method="sspo.py --clip=fixed --delimiter=" ;;  # a ratio per response, clip 0.2 (Fig. 3b, maybe Table 1)
    gspo-*k) method="$gspo --prompts-per-step=64 --updates-per-step=4 --steps=175 --eval-every=25" ;;  # SPS's Table 2
    gspo-*) method=$gspo ;;  # clip 3e-4 / 4e-4, GSPO's own
    drgrpo-*) method="$grpo --no-scale-advantage --normaliser=constant" ;;  # Dr. GRPO (Table 1)
    dapo-toy) method="$dapo 32" ;;  # SPS's Table 2, without SWIFT's filter; penalty over the last 32 of 96 tokens
    dapo-135m) method="$dapo 10" ;;  # 10 of 48
    dapo-0.5b) method="$dapo 205" ;;  # 205 of 1,024
    dapo-zero) method="$dapo 614 --max-draws=10" ;;  # 614 of 3,072, draws as verl's (GPG's Table 9)
    dapo-*) method="$dapo 2048" ;;  # the last 2,048 tokens
    cwgrpo-*) method=cwgrpo.py ;;  # the Gaussian kernel, KL to the initial model
    clip-cov-*) method="cwgrpo.py --reweight=clip-cov --normaliser=token" ;;  # Clip-Cov's mask, the same KL
    grpo-kl-* | grpo-math) method="cwgrpo.py --reweight=none" ;;  # the same KL (GPG: Tables 1, 15)
    grpo-toy | grpo-135m | grpo-*b) method=$grpo ;;  # GRPO: a ratio per token (Table 1)
    grpo-rs?) method="$row_a --normaliser=response --kl-coef=0.04" ;;  # GRPO's gradient, gpg.py's rewards
    grpo-* | gpg-kl-*) method="$row_a --kl-coef=0.04" ;;  # images: with one update GRPO's gradient; section 3.4
    gpg-a-*) method=$row_a ;;  # row A of Table 15: std of the group, no alpha, no threshold (Tables 11, 13)
    gpg-b-*) method="gpg.py --no-accurate-gradient --beta-th=0" ;;  # row B: no normalisation
    gpg-c-*) method="gpg.py --beta-th=0" ;;  # row C: row B with alpha
    gpg-group-alpha-*) method="gpg.py --norm=group --beta-th=0" ;;  # row A with alpha (Table 1)
    gpg-beta0.8-*) method="gpg.py --beta-th=0.8" ;;  # threshold 0.8 (Table 10)
    gpg-batch-*) method="gpg.py --norm=batch --no-accurate-gradient --beta-th=0" ;;  # std of the batch (Table 13)
    gpg-g[1-9]*) group=${1#gpg-g} group=${group%%-*} method="$row_a --group-size=$group" ;;  # Table 11
    gpg-*) method=gpg.py ;;  # row D, recommended: alpha, threshold 0.6
    sps-act-*) method=$act ;;  # an IRL learning rate that acts (ours)
    sps-uniform-*) method="$act --choose=uniform" ;;  # demonstrations drawn at random (section 4.1)
    sps-quantile-*) method="$act --choose=quantile" ;;  # from a step's lower 3/8 (C.1; ours)
    sps-k[1-5]-*) method="$act --demonstrations=${k%%-*} --irl-steps=0 --irl-passes=1" ;;  # K each (Fig. 4)
    sps-grpo-*) method="sps.py --irl-steps=0" ;;  # without IRL stages
    sps-*) method=sps.py ;;  # as printed: IRL learning rate 5e-10
  esac
  read -r script own <<<"$method"
}

# ------------------------------------------- sizes: model, data, lengths and evaluation, by the first row that fits
aime24=HuggingFaceH4/aime_2024 aime25=math-ai/aime25 amc23=knoveleng/AMC-23 amc83=AI-MO/aimo-validation-amc
math500=HuggingFaceH4/MATH-500 minerva=knoveleng/Minerva-Math olympiad=knoveleng/OlympiadBench
matharena=MathArena/brumo_2025,MathArena/hmmt_feb_2025,MathArena/hmmt_nov_2025
math_3to5=data/understand-r1-zero/datasets/train/math_lvl3to5_8k see=tasks/toy-images large=--activation-checkpointing
b1=--micro-batch-tokens=32768 b7="$large --micro-batch-tokens=65536"  # 1.5B, 7B: 3/4 of 8 x 80 GB
iou=tasks/rewards.py:iou flat="--temperature=1 --lr-warmup=0 --lr-floor=1 --weight-decay=0.01"
toy="--model=tasks/toy/model --template=plain --dataset=tasks/toy/train.jsonl --eval-samples=8 --eval-temperature=1
  --eval=tasks/toy/heldout.jsonl,tasks/toy/harder.jsonl --eval-every=40 --prompts-per-step=32 --max-prompt-tokens=32
  --max-response-tokens=96 --lr=2e-4 --steps=120"
if [ $machine = gpu ]; then toy+=" --gpu-memory-utilization=0.1"; fi
seen="$toy --model=$see/model --image-column=image --dataset"
smollm="$flat --model=tasks/smollm/model --template=tasks/smollm.txt --dataset=tasks/smollm/train.jsonl --eval-samples=8
  --eval-temperature=1 --eval=tasks/smollm/heldout.jsonl,tasks/smollm/harder.jsonl --eval-every=100 --group-size=8
  --prompts-per-step=8 --max-prompt-tokens=256 --max-response-tokens=48 --micro-batch-tokens=1024 --lr=5e-6 --steps=12"
sspo="$b1 --eval=$aime24,$amc83,$math500,$minerva,$olympiad --keep-best --dataset=$math_3to5"
as_sspo="$sspo $flat --template=qwen-math --prompts-per-step=128 --group-size=8 --updates-per-step=4 --steps=200
  --max-prompt-tokens=1024 --max-response-tokens=3000 --max-total-tokens=0 --no-format-reward --checkpoints-kept=2"
gpg="$b7 --eval=$aime24,$amc23,$math500,$minerva,$olympiad"
as_gpg="--model=Qwen/Qwen2.5-Math-7B --template=qwen-boxed --weight-decay=0.1"  # gpg.py's defaults
rs="$b1 --model=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --template=open-rs --format-reward --group-size=6
  --prompts-per-step=64 --max-prompt-tokens=512 --max-response-tokens=3584 --temperature=0.7 --lr-warmup=0.1
  --lr-floor=0.1 --weight-decay=0"  # the recipe of Open-RS; its decay is TRL's default
# 16 prompts: 8 GPUs, one each, accumulated twice (sat: once); the rest is TRL's default
sees="$large --image-column=image --max-pixels=401408 --model=Qwen/Qwen2-VL-2B-Instruct --template=chat --beta-th=0.4
  --normaliser=response --format-reward --prompts-per-step=16 --max-prompt-tokens=1024 --max-response-tokens=256
  --weight-decay=0 --lr-floor=0" classes="$sees --reward=tasks/rewards.py:class_name --dataset"
size() {  # SCRIPT:METHOD-SIZE
  local prompts=$((512/group)) model=${1%b-*} problems=${1##*-}  # 512 responses (GPG's code)
  local gsm8k="$large $flat --gpu-memory-utilization=0.5 --model=Qwen/Qwen2.5-0.5B-Instruct --template=chat-boxed
    --dataset=openai/gsm8k:main:train --eval=openai/gsm8k:main:test --eval-every=29 --max-prompt-tokens=512
    --max-response-tokens=1024 --lr=2e-6 --prompts-per-step=$prompts --steps=$((7473/prompts))"  # an epoch; untried
  local math="$gpg --dataset=DigitalLearningGmbH/MATH-lighteval:train --max-prompt-tokens=512 --max-response-tokens=1024
    --lr=2e-6 --lr-warmup=0.1 --prompts-per-step=$prompts --steps=$((7500/prompts))"  # an epoch; a threshold: more
  local sps="$b1 --model=Qwen/Qwen2.5-Math-${model##*-}B --subset=${problems%k}000 --eval=$aime24,$aime25,$matharena
    --eval-samples=128 --eval-temperature=0.7 --eval-every=100 --keep-best"
  [[ $1 != *-7b-* ]] || sps+=" $b7 --micro-batch-tokens=49152"  # IRL has moments, too
  case $1 in
    *-image-toy) size="$seen $see/image-train.parquet --eval=$see/image-heldout.parquet --steps=60 --eval-every=20" ;;
    *-ground-toy) size="$seen $see/ground-train.parquet --eval=$see/ground-heldout.parquet --reward=$iou" ;;
    cwgrpo.py:*-toy) size="$toy --no-format-reward --group-size=8 --temperature=1 --kl-coef=0.004" ;;  # docs/cwgrpo.md
    sps.py:*-toy) size="$toy --rl-steps=40 --irl-batch=256 --subset=0" ;;  # three rounds
    *-toy) size=$toy ;;
    sspo.py:*-135m) size="$smollm --updates-per-step=2" ;;
    cwgrpo.py:*-135m) size="$smollm --no-format-reward" ;;
    sps.py:*-135m) size="$smollm --subset=0 --rl-steps=5 --irl-batch=32 --irl-lr=3e-6" ;;  # two rounds, two steps more
    *-135m) size=$smollm ;;
    sspo.py:*-0.5b) size="$gsm8k --lr=1e-6" ;;  # four updates a step
    gpg.py:*-0.5b) size=$gsm8k ;;
    cwgrpo.py:*-0.5b) size="$gsm8k --group-size=8 --no-format-reward" ;;
    sps.py:*-0.5b) size="$gsm8k --subset=0 --rl-steps=29" ;;  # four rounds
    sspo.py:*-1.5b) size=$sspo ;;
    sspo.py:*-7b) size="$sspo $b7 --model=Qwen/Qwen2.5-Math-7B --alpha=0.15 --gamma=2.2" ;;  # for --clip=entropy
    cwgrpo.py:sspo-*-1.5b) size="$as_sspo --model=Qwen/Qwen2.5-Math-1.5B" ;;  # sspo.py's defaults
    cwgrpo.py:sspo-*-7b) size="$as_sspo $b7 --model=Qwen/Qwen2.5-Math-7B" ;;
    cwgrpo.py:*-1.5b) size=$b1 ;;
    cwgrpo.py:*-7b) size="$b7 --model=Qwen/Qwen2.5-Math-7B-Instruct --no-format-reward --steps=150" ;;
    gpg.py:*-7b) size=$gpg ;;
    *-zero) size="$gpg $as_gpg --dataset=BytedTsinghua-SIA/DAPO-Math-17k --prompts-per-step=144 --steps=1100
      --max-response-tokens=3072" ;;
    sspo.py:*-math) size="$math $as_gpg --updates-per-step=1" ;;
    cwgrpo.py:*-math) size="$math $as_gpg --no-format-reward --group-size=8 --temperature=1 --lr-floor=1" ;;
    gpg.py:*-math) size=$math ;;
    *-rs1) size="$rs --dataset=knoveleng/open-s1 --steps=100" ;;
    *-rs3) size="$rs --dataset=knoveleng/open-rs --steps=50" ;;
    *-geoqa) size="$sees --model=Qwen/Qwen2.5-VL-3B-Instruct --template=tasks/geoqa.txt --reward=tasks/rewards.py:geoqa
      --dataset=leonardPKU/GEOQA_R1V_Train_8K --steps=502" ;;  # 8,031 / 16
    *-flower) size="$classes laolao77/ViRFT_CLS_flower_4_shot --steps=$((102*4*8/16))" ;;  # classes, shots, epochs
    *-pets) size="$classes laolao77/ViRFT_CLS_pets37_4shot --steps=$((37*4*24/16))" ;;
    *-aircraft) size="$classes laolao77/ViRFT_CLS_fgvc_aircraft_4_shot --steps=$((100*4*8/16))" ;;
    *-car) size="$classes laolao77/ViRFT_CLS_car196_4shot --steps=$((196*4*8/16))" ;;
    *-sat) size="$sees --model=Qwen/Qwen2-VL-2B --template=tasks/sat.txt --reward=tasks/rewards.py:option
      --max-response-tokens=700 --dataset=data/sat.parquet --prompts-per-step=8 --steps=3000" ;;  # about 12,000 x 2 / 8
    *-lisa) size="$sees --reward=$iou --dataset=data/lisa-train.parquet --steps=498" ;;  # 6 epochs, as Visual-RFT's
    sspo.py:*k) size="$sps --dataset=Elliott/Openr1-Math-46k-8192 --max-response-tokens=3072 --lr=5e-7 --steps=700
      --weight-decay=0.1 --adam-betas 0.9 0.95 --prompts-per-step=16 --updates-per-step=1" ;;
    sps.py:sps-k*k) size="$sps --steps=$((2*((${problems%k}000+15)/16)))" ;;  # two epochs
    sps.py:*k) size=$sps ;;
  esac
}

# ------------------------------------------------------------------------------------------------------------- commands
once() (  # FILE COMMAND...: make what is not there, or wait for another run.sh that makes it
  if [ -e "$1" ]; then exit; fi
  exec 9<.
  flock --nonblock 9 || { echo "another run.sh is setting up: waiting"; flock 9; }
  if [ ! -e "$1" ]; then "${@:2}"; touch "$1"; fi
)

install() {
  local base package index=https://download.pytorch.org/whl/cpu  # much smaller
  for base in python3{,.12,.13,.11,.14} "Python 3.11 to 3.14"; do  # bash says that the last is not found
    [[ $("$base" -V 2>&1) == *\ 3.1[1-4].* ]] && break; done
  echo "setting up $venv (once, some minutes)"; "$base" -m venv $venv
  if [ $machine = gpu ] ||
    ! "$python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then index=; fi
  "$python" -m pip install ${index:+--extra-index-url $index} -r requirements-$machine.txt
  for package in torchvision torchaudio torchcodec; do  # builds for another torch break transformers
    "$python" -c "import $package" 2>/dev/null || "$python" -m pip uninstall -qqy $package; done
}

setup() {
  if [ -n "$wrong" ]; then echo "run.sh: $wrong; CPU=1 ./run.sh ... leaves GPUs unused" >&2; exit 1; fi
  once "$venv/ready-$(cksum <requirements-$machine.txt | cut -d' ' -f1)" install
  if [[ $machine = gpu && $driver-$word != none-setup ]]; then "$python" -c "import torch; torch.cuda.init()"; fi
}

merge() {  # FLAGS...: into `flags`; of a flag that comes twice, or once as --no-flag, the last stays
  seen=" " flags=() values=()
  for ((i=$#; i>0; i--)); do
    values=("${!i}" "${values[@]}"); [[ ${!i} == --* ]] || continue
    key=${!i#--} key=${key#no-} key=${key%%=*}
    if [[ $seen != *" $key "* ]]; then flags=("${values[@]}" "${flags[@]}") seen+="$key "; fi; values=()
  done
}

compose() { method "$1"; size "$script:$1"; merge $size $own "${@:2}"; }  # EXPERIMENT FLAGS...
start() {  # EXPERIMENT FLAGS...
  if [[ " ${names[*]} " != *" $1 "* ]]; then echo "run.sh: no experiment or command $1: ./run.sh list" >&2; exit 2; fi
  compose "$@"
  set -- "$1" "${SCRIPT:-$script}" "${flags[@]}"
  if [ -n "${DRY:-}" ]; then printf '%q ' "${@:2}"; echo; exit; fi
  export EXPERIMENT=${SCRIPT:+$(basename "$SCRIPT" .py)-}$1  # a run's folder is named after it
  setup
  if [[ $* == *[\ =]$math_3to5* ]]; then ./run.sh data; fi
  if [[ $* == *[\ =]$see/* ]]; then once $see/model/model.safetensors "$python" tasks/toy_images.py; fi
  if [[ $* == *[\ =]tasks/smollm/* ]]; then once tasks/smollm/model/model.safetensors "$python" tasks/smollm.py; fi
  if [[ $1 == *-135m ]]; then export PROCESSES=1; fi  # two would exchange 540 MB a micro-batch
  exec "$python" tools/launch.py "${@:2}"
}
word=${1:-default}; shift $(($# > 0))
if [ "$here" != "$PWD" ]; then  # --run-dir, FILE, FILE:FUNCTION and FILEs are where the user stands
  for argument in "$@"; do
    value=${argument#--*=} flag=${before:-}=$argument
    if [[ $flag == *@(--run-dir|-o|--out)=[!/]* || $flag != *--@(delimiter=*|track=*|template=+([!./])) &&
      $value == [!-/0-9]* && -e $here/${value%%[:,]*} ]]; then value=$here/${value//,/,$here/}; fi
    set -- "${@:2}" "${argument%"${argument#--*=}"}$value"; before=${argument##*=*}
  done
fi
case $word in
  help | -h | --help) sed -nE '2,7s/^# //p; s/^    ([a-z].*)\) method=.*;;  # /  \1  /p' run.sh ;;
  list) for name in "${names[@]}"; do compose "$name"; printf '%q ' "$name" "$script" "${flags[@]}"; echo; done ;;
  setup) setup ;;
  data) once $math_3to5 git clone --depth 1 https://github.com/sail-sg/understand-r1-zero data/understand-r1-zero ;;
  test) setup; exec "$python" -m pytest "$@" ;;
  eval) setup; exec "$python" tools/launch.py tools/eval.py "$@" ;;
  prove) setup; PROCESSES=3 OMP_NUM_THREADS=1 exec "$python" tools/launch.py tools/prove.py "$@" ;;
  plot | why) setup; exec "$python" "tools/$word.py" "$@" ;;
  sweep | table) setup; exec "$python" tools/sweep.py "$word" "$@" ;;
  claims) setup; PROCESSES=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$python" tools/claims.py "$@" ;;
  default) run=runs/sspo-toy-$(date +%Y%m%d-%H%M%S)
    (start sspo-toy --run-dir "$run"); if [ -n "${DRY:-}" ]; then exit; fi
    "$python" tools/plot.py "$run"; "$python" tools/plot.py "$run" --figure=tokens ;;
  *) start "$word" "$@" ;;
esac
