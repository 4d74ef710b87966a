"""A first engine, started by being imported: the process that engines fork from loads what vLLM loads once.

That process imports this module and nothing runs in it afterwards. A fork of a process that has run torch
hangs, because torch's threads are not in it.
"""

from ..traffic.driver import Driver

Driver()
