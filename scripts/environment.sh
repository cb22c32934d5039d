# Sourced by ./demo, ./test and ./bench: makes .venv ready and leaves $PYTHON pointing into it. Does nothing when nothing
# has changed. Everything stays inside the checkout and the user's own cache folders; no root is needed.
#
#   KEEPWARM_PYTHON       the Python 3.11 … 3.13 to build .venv with (default: the first one found)
#   KEEPWARM_TORCH        what to hand to pip for torch (default: torch==2.13.0 without a GPU, any torch>=2.4 with one)
#   KEEPWARM_TORCH_INDEX  an extra package index for torch, such as PyTorch's own index of CPU builds

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
PYTHON=$venv/bin/python

suitable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${KEEPWARM_PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if command -v "$candidate" >/dev/null 2>&1 && suitable "$candidate"; then command -v "$candidate"; return; fi
  done
  echo "keepwarm needs Python 3.11, 3.12 or 3.13 and found none; set KEEPWARM_PYTHON to one." >&2
  return 1
}

make_venv() {
  local base; base=$(find_python) || return 1
  "$base" -m venv "$venv" && return
  rm -rf "$venv"
  echo "'$base -m venv' failed; on Debian and Ubuntu the package python3-venv brings what it needs." >&2
  return 1
}

# prepare EXTRAS GROUPS: installs keepwarm with these extras and dependency groups unless exactly this is installed already.
prepare() {
  local extras=$1 groups=$2 torch=${KEEPWARM_TORCH:-} stamp wanted
  if [ -z "$torch" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then torch='torch>=2.4'; else torch='torch==2.13.0'; fi
  fi
  stamp=$venv/.keepwarm-$(echo "$extras-$groups" | tr -c 'a-z0-9\n' _)
  wanted=$(cat "$root"/pyproject.toml "$root"/setup.py "$root"/scripts/environment.sh "$root"/*/*.c | sha256sum; echo "$torch ${KEEPWARM_TORCH_INDEX:-}")
  if [ -x "$PYTHON" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
  echo "Setting up $venv (once; the largest download is torch) ..." >&2
  suitable "$PYTHON" || make_venv || return 1
  local pip=("$PYTHON" -m pip --disable-pip-version-check install --quiet --quiet)
  "${pip[@]}" --upgrade 'pip>=25.1' || return 1
  "${pip[@]}" ${KEEPWARM_TORCH_INDEX:+--extra-index-url "$KEEPWARM_TORCH_INDEX"} "$torch" numpy || return 1
  "${pip[@]}" --editable "$root[$extras]" $(for group in $groups; do echo --group "$root/pyproject.toml:$group"; done) || return 1
  echo "$wanted" >"$stamp"
}
