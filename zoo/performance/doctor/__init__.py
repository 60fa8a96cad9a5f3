"""The doctor: whether this machine, with its drivers and packages, computes what it should."""

from zoo.performance.doctor.examination import Examination, doctor

__all__ = ["Examination", "doctor"]
