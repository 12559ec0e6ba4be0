#!/usr/bin/env bash
# Verify and bench the bundles of a pack on this machine. Needs no network, no compiler, no pip:
# Python of the pack's version, and for DEVICE=cuda an NVIDIA driver.
#
#   bash run.sh [--out FILE.json]          in a pack made by prepare.py
#
# DEVICE=URI     IREE device (default: the pack's)          PYTHON=PROGRAM   default: python3
# LIMIT=SECONDS  for everything together (default 345; more for slow devices)
set -euo pipefail
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$pack/drive.py" "$pack" --limit "${LIMIT:-345}" \
  ${DEVICE:+--device "$DEVICE"} "$@"
