"""Decays per channel on Hopper: one pass forward and one backward."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...gpu.launch import LaunchSpec
from ...gpu.plan import prepared
from ...gpu.reductions import add_subheads
from .call import Arguments, Call, InputGradients, Saved, Wanted
from .plan import LinearRecurrence

QKV = {"q": "q", "k": "k", "v": "v"}
QKV_GRAD = {**QKV, "grad": "grad"}


class OnePass(Call):
    """A call that the kernels in Gluon serve (`hopper_vector_decay.py`)."""

    def output(self, o: Tensor, first: Tensor | None, last: Tensor | None, *, keep: bool) -> Saved:
        plan = self.plan
        states, ends = (plan.states_of_chunks(), plan.ends_of_chunks()) if keep else (None, None)
        inputs, final = (self.k, self.v, self.log_decay, o), None if plan.segmented else last
        _outputs(plan)(self.q, *inputs, states, ends, first, final, plan.layout.segments)
        return Saved() if states is None else Saved(states=states, ends=ends)

    def gradients(self, saved: Saved, last: Tensor | None, first_grad: Tensor | None, wanted: Wanted) -> InputGradients:
        plan = self.plan
        dq, dk, dv = plan.per_token(plan.K), plan.per_token(plan.K), plan.new(plan.B, plan.T, plan.H, plan.V)
        dg = plan.per_token(plan.K, plan.decay_dtype) if wanted.log_decay else None
        results = InputGradients(dq, dk, dv, dg)
        if saved.states is not None or plan.rows_at_a_time == plan.B:
            self._fill(results, saved, last, first_grad)
            return results
        for stop in range(plan.rows_at_a_time, plan.B + plan.rows_at_a_time, plan.rows_at_a_time):
            end = min(stop, plan.B)  # the last rows may repeat some: fewer rows would be cut into segments
            rows = slice(end - plan.rows_at_a_time, end)
            part = InputGradients(dq[rows], dk[rows], dv[rows], None if dg is None else dg[rows])
            first, *of_states = (None if x is None else x[rows] for x in (saved.first, last, first_grad))
            self._for_rows(rows)._fill(part, Saved(first), *of_states)
        return results

    def _for_rows(self, rows: slice) -> "OnePass":
        """Return the call for these rows of the batch, for the backward pass."""
        assert self.log_decay is not None
        assert self.grad is not None
        q, k, v, log_decay, grad = (x[rows] for x in (self.q, self.k, self.v, self.log_decay, self.grad))
        scale, subheads = self.plan.scale, self.plan.subheads
        args = Arguments(q, k, v, log_decay, None, None, None, scale=scale, subheads=subheads, keep=False)
        sizes = self.plan.sizes._replace(q_shape=q.shape, q_stride=q.stride(), k_stride=k.stride())
        sizes = sizes._replace(v_shape=v.shape, v_stride=v.stride())
        return OnePass(LinearRecurrence.of(None, self.plan.T, *sizes), args, grad)

    def _fill(self, results: InputGradients, saved: Saved, last: Tensor | None, first_grad: Tensor | None) -> None:
        """Fill the gradients of the inputs from the states before all chunks, recomputed unless they are saved."""
        plan, (first, states, ends) = self.plan, saved
        if states is None or ends is None:
            states, ends = plan.states_of_chunks(), plan.ends_of_chunks()
            _states(plan, False)(self.k, self.v, self.log_decay, states, ends, first, None, None, plan.layout.segments)
        dv = results.v if plan.subheads == 1 else plan.per_token(plan.V)
        inputs, outputs = (self.k, self.v, self.grad, self.log_decay), (results.q, results.k, dv, results.log_decay)
        first_grad = None if plan.segmented else first_grad
        _gradients(plan)(self.q, *inputs, states, ends, *outputs, last, first_grad, plan.layout.segments)
        if plan.subheads > 1:
            add_subheads(dv, plan.subheads, results.v)

    def segment_states(self, last: Tensor, survives: Tensor, *, reverse: bool) -> None:
        x, y = (self.q, self.grad) if reverse else (self.k, self.v)
        launch = _states(self.plan, reverse)
        launch(x, y, self.log_decay, None, None, None, last, survives, self.plan.layout.segments)


def in_gluon(plan: LinearRecurrence, kernel: Any, streams: Mapping[str, str], **constants: Any) -> LaunchSpec:
    """A pass in Gluon: one program per segment and recurrence."""
    heads, tokens = plan.strides(**streams)
    numbers = (plan.scale, *heads, plan.chunks, plan.groups)
    sizes: dict[str, Any] = {**tokens, "heads": plan.heads, "SUBHEADS": plan.subheads, **constants}
    return LaunchSpec(kernel, plan.segments * plan.heads, *numbers, **sizes, warps=8, checked=True)


@prepared
def _outputs(plan: LinearRecurrence) -> LaunchSpec:
    """Outputs and last states."""
    from .hopper_vector_decay import outputs  # other devices do without Gluon

    return in_gluon(plan, outputs, QKV, K=plan.K)


@prepared
def _states(plan: LinearRecurrence, reverse: bool) -> LaunchSpec:
    """The states before all chunks, or the last one of each segment; in reverse their gradients."""
    from .hopper_vector_decay import states

    streams = {"x": "q", "y": "grad"} if reverse else {"x": "k", "y": "v"}
    return in_gluon(plan, states, streams, K=plan.K, REVERSE=reverse)


@prepared
def _gradients(plan: LinearRecurrence) -> LaunchSpec:
    """All gradients."""
    from .hopper_vector_decay import gradients

    return in_gluon(plan, gradients, QKV_GRAD, K=plan.K)
