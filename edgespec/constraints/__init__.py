"""Constrain replies to a JSON schema, a regular expression, a grammar or a list of choices."""

from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.processor import ConstraintProcessor
from edgespec.constraints.specification import Constraint, constraint_from

__all__ = ["Constraint", "ConstraintCompiler", "ConstraintProcessor", "constraint_from"]
