"""The C extension: CUPTI buffers become rows that numpy views. It needs no CUDA to build and none to import."""
