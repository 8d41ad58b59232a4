"""Constrain replies to a JSON schema, a regular expression, a grammar or a list of choices."""

from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint, constraint_from
from edgespec.constraints.processor import ConstraintProcessor

__all__ = ["Constraint", "ConstraintCompiler", "ConstraintProcessor", "constraint_from"]
