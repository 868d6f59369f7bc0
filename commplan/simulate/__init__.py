"""What a plan costs on a network: predictions, simulation of schedules, lower bounds, calibrations."""

from commplan.simulate.calibration import Calibration as Calibration
from commplan.simulate.calibration import load_calibration as load_calibration
from commplan.simulate.cost import predict as predict
from commplan.simulate.network import Network as Network
from commplan.simulate.network import one_group as one_group
from commplan.simulate.predictor import Predictor as Predictor
from commplan.simulate.timeline import Simulation as Simulation
from commplan.simulate.timeline import simulate as simulate
