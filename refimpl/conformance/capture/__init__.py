"""Tensors dumped from a real training step, judged: `thdcp check --capture`.

- `check`: the way from files to verdicts, `check_capture`.
- `settings`, `file`, `safetensors_file`: what a dump must say, and how it is read.
- `sample`: which rows are looked at. `rows`: what is expected in them.
- `verdict`: whether a tensor is right. `pattern`: what is known of how it is wrong.
"""
