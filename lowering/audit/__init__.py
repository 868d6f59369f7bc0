"""Audit of compiled programs: compare the scheduled HLO of a step with its plan."""

from commplan.lowering.audit.compare import compare as compare
from commplan.lowering.audit.expect import Expected as Expected
from commplan.lowering.audit.expect import expected as expected
from commplan.lowering.audit.report import Audit as Audit
from commplan.lowering.audit.report import audit as audit
from commplan.lowering.gpu.bound import least_exposed as least_exposed
from commplan.lowering.gpu.estimate import Machine as Machine
from commplan.lowering.gpu.estimate import estimate as estimate
from commplan.lowering.gpu.targets import target as target
from commplan.lowering.hlo.reader import HloError as HloError
from commplan.lowering.hlo.step import CompiledCollective as CompiledCollective
from commplan.lowering.hlo.step import CompiledStep as CompiledStep
from commplan.lowering.hlo.step import StepText as StepText
from commplan.lowering.hlo.walk import audit_text as audit_text
