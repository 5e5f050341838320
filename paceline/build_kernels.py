"""Builds the C kernels ahead of their first use: ``python -m paceline.build_kernels``.

`make install` and a deployment that starts run it beside what else takes time then. It imports no
torch: the loader does so only to share torch's threads with the kernels, and nothing computes here.
So it takes a tenth of a second where the kernels have been built before.
"""

from __future__ import annotations

import signal
import sys
import types


def main() -> None:
    """Build what is missing in the cache; exit code 1 and a reason where that does not work."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave nothing half built behind
    sys.modules.setdefault("torch", types.ModuleType("torch"))
    from paceline.models import kernels

    usable, where = kernels.status()
    if not usable:
        sys.exit(where)


if __name__ == "__main__":
    main()
