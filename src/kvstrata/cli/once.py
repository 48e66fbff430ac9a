"""Options that have one value are given once."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

__all__ = ["OnceCommand"]


class OnceCommand(TyperCommand):
    """Refuses an option that is given again: the parser would take its last value, and say nothing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        options = [param for param in self.get_params(ctx) if isinstance(param, TyperOption)]
        for option in options:
            if given.count(option) > 1 and not (option.multiple or option.is_flag):
                raise typer.BadParameter("it is given more than once", ctx, option)
        return super().parse_args(ctx, args)
