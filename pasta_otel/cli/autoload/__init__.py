"""A folder for PYTHONPATH: Python imports its ``sitecustomize`` before the program's first line."""
