"""python -m tightkv"""

import sys

from tightkv.tools.cli import main

sys.exit(main())
