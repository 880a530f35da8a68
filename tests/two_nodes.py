"""What two_nodes.sh starts: ranks that meet."""

import sys

import common

sys.excepthook = common.report
print("met", common.init_world().all_gather(1))
