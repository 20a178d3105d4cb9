"""A campaign against the library, to be repeated: kills, damaged and random inputs, full disks, two writers.

``make torture`` runs it; ``python -m torture --help``, from the folder ``tests``, tells its options. What is attacked stands
in one file per kind of attack; ``campaign`` runs them in child processes and counts; ``table`` prints.
"""
