"""The cost of plans on a network: predictions, simulated schedules, lower bounds and calibrations."""

from commplan.cost.calibration import Calibration as Calibration
from commplan.cost.calibration import load_calibration as load_calibration
from commplan.cost.collective.cost import CollectiveQuery as CollectiveQuery
from commplan.cost.collective.cost import collective_time as collective_time
from commplan.cost.network.network import Network as Network
from commplan.cost.network.network import one_group as one_group
from commplan.cost.schedule.prediction import Prediction as Prediction
from commplan.cost.schedule.prediction import predict as predict
from commplan.cost.schedule.predictor import Predictor as Predictor
from commplan.cost.schedule.predictor import predictor_for as predictor_for
from commplan.cost.schedule.step import StepComputation as StepComputation
from commplan.cost.schedule.step_profile import check_step as check_step
from commplan.cost.schedule.step_profile import load_step as load_step
