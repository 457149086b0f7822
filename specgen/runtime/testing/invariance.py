"""The check of `batch_invariant: true`: no bit of a sequence depends on the other sequences of a call.

Runs a package's public functions as a caller does, the choice of table rows included. Touches only tensors it
allocates.
"""

import torch

from .cases import NEIGHBOURS, Case, fit
from .checks import NAN, assert_matches, attention_rows, device_for, varlen_row
from .packed import PackedPool
from .pools import Pool, bits


def check_batch_invariance(package, case: Case) -> None:
    """Each sequence of some batches gives the same bits of out and lse alone: other neighbours, another place
    in the batch, other bounds and a narrower block table. Which table rows serve is the package's choice.
    """
    device = device_for(case)
    packed = case.family == "varlen"
    varlen_row(package, case, device) if packed else attention_rows(package, case, device)
    run = package.attention_varlen if packed else package.attention
    for batch in NEIGHBOURS:
        if batch.large and device.type == "cpu":
            continue
        fitted = fit(batch, case, case.max_tokens)
        pool = (PackedPool if packed else Pool)(case, device, [fitted], "plain" if case.aligned else "odd")
        pool.load(fitted, fill=NAN)
        _, lse = pool.call(package, return_lse=True)
        assert_matches(pool, lse, f"{case.symbol}, {fitted.sequences}")
        together, together_lse = bits(pool.result()), bits(lse)
        start = 0
        for seq, (rows, _) in enumerate(fitted.sequences):
            own, start = slice(start, start + rows), start + rows
            if not rows:
                continue
            pool.poison_out()
            out, lse = run(**pool.only(seq), max_seqlen_q=rows, return_lse=True)
            label = f"{case.symbol}, sequence {seq} of {fitted.sequences}: other bits alone than among the others"
            assert torch.equal(bits(out), together[own]), label
            assert torch.equal(bits(lse), together_lse[own]), f"{label}, of lse"
