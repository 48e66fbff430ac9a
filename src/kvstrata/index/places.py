"""Where a block can be: bits of ``PrefixIndex.where``."""

from typing import Final

HOST: Final = 1
DISK: Final = 2
REMOTE: Final = 4  # as far as is known: others may have removed it since
ARRIVING: Final = 8  # being read into host memory
WRITING: Final = 16  # reserved by a running put; not visible to gets

HELD: Final = HOST | ARRIVING | WRITING  # they have a host slot
LOCAL: Final = HOST | DISK  # the tiers whose content is known for certain

NO_SLOT: Final = -1
"""The host slot of a block that is not in host memory."""
