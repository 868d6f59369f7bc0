"""Warnings of a plan that is sound and yet hardly what was meant, and the repairs that are certain.

`usage` finds what nobody uses, `input` what loads and random functions lose, `cost` what buckets and pins
cost where shapes and a topology are given, `ignores` reads `# commplan: ignore CODE`, and `repairs` puts
fixes into a text. A new warning is a function of a `Subject` in one of them, listed in `lints.LINTS`, with a
code in CP12 and its page. The compiler is loaded only where it is asked.
"""

from commplan.lint.lints import lint as lint
from commplan.lint.subject import Given as Given
