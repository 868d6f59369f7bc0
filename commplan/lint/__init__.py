"""Warnings for valid plans that are probably mistakes, and safe repairs.

- `usage`: unused declarations and values.
- `input`: records lost by loads, and random functions.
- `cost`: the cost of buckets and pins, if shapes and a topology are available.
- `ignores`: comments `# commplan: ignore CODE`.
- `repairs`: applies fixes to a text.

A new warning is a function of a `Subject` in one of these modules, listed in `lints.LINTS`, with a code in
CP12 and its page. The compiler is imported only if a lint needs it.
"""

from commplan.lint.lints import lint as lint
from commplan.lint.subject import LintInputs as LintInputs
