"""The numbers of FL Games (Gupta et al. 2022, arXiv 2205.11101), to print beside ours.

Tables 2 and 3 are shifted in the paper: their rows for two classes are those of Table 1's Fashion
and CIFAR-10, so two classes are taken from Table 1 here.
"""

from typing import NamedTuple

DATA = ("colored_mnist", "colored_fashion", "spurious_cifar10", "colored_dsprites")


class Numbers(NamedTuple):
    """What the paper reports of one method on one data set; mean ± standard deviation, percent."""

    train: str = ""
    test: str = ""
    rounds: str = ""  # to equilibrium


# Table 1: training and test accuracy on the first two and on the last two of DATA.
_TABLE_1_MNIST = """
FedSGD                    84.88±0.16  10.45±0.60  83.49±1.22  20.13±8.06
FedAvg                    84.45±2.69  12.52±4.34  86.23±0.63  13.33±2.07
FedBN                     99.75±0.11  47.16±3.76  99.79±0.17  41.24±1.87
FedProx                   99.56±0.38  29.31±0.89  99.87±0.12  29.41±0.36
F-sequential              55.76±2.03  66.56±1.58  75.13±1.38  68.40±1.83
F-sequential-SMOOTH       62.83±5.06  66.83±1.83  75.18±0.37  71.81±1.60
F-parallel                58.03±6.22  67.14±2.95  71.71±8.23  69.73±2.12
F-parallel-SMOOTH         61.07±1.71  67.21±2.98  72.81±4.51  71.36±4.19
V-sequential              56.40±0.03  63.78±1.58  69.90±4.56  69.90±1.31
V-sequential-SMOOTH+FAST  61.03±3.11  65.81±3.28  75.10±0.48  69.85±1.22
V-parallel                52.89±8.03  68.34±5.24  66.33±9.39  69.85±3.42
V-parallel-SMOOTH+FAST    63.11±3.02  65.73±1.53  71.89±5.58  69.41±5.49
"""
_TABLE_1_OTHERS = """
FedSGD                    84.79±0.17  12.57±0.55  99.15±1.10  24.12±2.00
FedAvg                    85.41±1.45  13.11±1.82  99.21±1.35  22.56±2.34
FedBN                     95.24±2.34  25.16±4.06  98.09±1.45  25.19±1.78
FedProx                   99.67±0.13  24.76±2.67  85.17±1.95  11.12±0.99
F-sequential              50.36±2.78  45.36±4.33  53.98±3.67  52.89±4.41
F-sequential-SMOOTH       64.02±2.08  45.54±1.04  52.87±3.30  61.45±7.11
F-parallel                55.06±2.04  52.07±1.60  52.88±2.78  56.50±6.23
F-parallel-SMOOTH         56.98±4.09  54.71±2.13  53.65±2.11  62.76±5.97
V-sequential              61.72±7.39  46.07±6.01  51.36±5.32  62.84±7.20
V-sequential-SMOOTH+FAST  50.37±4.97  50.94±3.28  51.55±3.20  68.23±4.56
V-parallel                50.41±3.31  50.43±3.04  53.56±4.91  65.87±6.84
V-parallel-SMOOTH+FAST    45.83±2.44  49.89±5.66  54.25±2.05  68.91±6.47
"""

# Table 4: rounds to equilibrium on all of DATA but the first.
_TABLE_4 = """
F-sequential               158.0 339.5 367.9
F-sequential-SMOOTH        113.2 304.0 257.0
F-parallel                 134.2 237.4 233.1
F-parallel-SMOOTH           58.4 217.6 210.4
V-sequential               454.8 557.6 628.6
V-sequential-SMOOTH+FAST   189.0 363.3 455.5
V-parallel                 367.3 498.7 520.9
V-parallel-SMOOTH+FAST     127.8 102.4 203.0
"""

# Tables 2 and 3: training and test accuracy with 5 and 10 classes, on the first two of DATA.
_TABLE_2_3 = """
F-sequential-5-classes     79.39±0.91 69.90±3.16  77.28±1.54 69.35±0.66
F-sequential-10-classes    82.27±0.76 69.22±3.11  80.02±0.38 71.22±3.00
F-parallel-5-classes       78.61±2.86 68.42±2.54  77.61±1.51 70.83±0.96
F-parallel-10-classes      82.17±1.21 69.29±3.17  80.12±0.78 70.39±2.28
"""

# Figures 8 and 9 (b): training and test accuracy by the number of clients, on Fashion and CIFAR-10.
_FIGURES_8_9 = """
F-sequential-2-clients          59.85±7.80 65.99±2.44  50.37±3.07 48.70±4.12
F-sequential-3-clients          53.76±5.46 67.22±0.93  48.61±1.40 59.31±12.45
F-sequential-5-clients          57.64±2.57 67.75±0.52  56.70±6.25 45.27±0.42
F-sequential-5_uneven-clients   56.48±2.10 67.17±0.84  62.62±6.84 47.27±3.81
F-sequential-10-clients         57.40±1.67 68.94±1.35  52.40±1.44 50.97±0.92
F-parallel-2-clients            58.29±4.31 69.38±3.61  57.13±4.82 50.50±2.70
F-parallel-3-clients            61.10±1.68 69.88±2.82  55.15±2.99 53.97±1.06
F-parallel-5-clients            60.00±5.78 68.57±2.86  54.72±1.07 51.91±0.50
F-parallel-5_uneven-clients     66.82±2.55 66.95±2.41  54.77±2.39 53.40±1.83
F-parallel-10-clients           63.86±3.60 70.71±2.99  52.67±1.11 53.50±0.84
"""


def _pairs(table: str, data: tuple[str, ...]) -> dict[tuple[str, str], Numbers]:
    numbers = {}
    for line in table.strip().splitlines():
        method, *cells = line.split()
        for index, name in enumerate(data):
            numbers[method, name] = Numbers(*cells[2 * index : 2 * index + 2])
    return numbers


def _all() -> dict[tuple[str, str], Numbers]:
    numbers = _pairs(_TABLE_1_MNIST, DATA[:2]) | _pairs(_TABLE_1_OTHERS, DATA[2:])
    for line in _TABLE_4.strip().splitlines():
        method, *cells = line.split()
        for name, rounds in zip(DATA[1:], cells, strict=True):
            numbers[method, name] = numbers[method, name]._replace(rounds=rounds)
    for play in ("F-sequential", "F-parallel"):
        for name in DATA[:2]:
            numbers[f"{play}-2-classes", name] = numbers[play, name]
    return numbers | _pairs(_TABLE_2_3, DATA[:2]) | _pairs(_FIGURES_8_9, DATA[1:3])


# (method as `fl_games_tables` labels it, data set) -> the paper's numbers.
NUMBERS = _all()
