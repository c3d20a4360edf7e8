"""The table of a module's parts that a fit of the command line prints before its first step."""

from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class ParameterSummary(ModelSummary):
    """Print the parameters of each part of a module.

    Lightning's own table has a column of FLOPs, too. It counts them on the module's ``example_input_array``, and shows
    0 for a module without one; ``plan`` counts them on a real step.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: object,
    ) -> None:
        columns = dict(summary_data)
        shown = [columns[name] for name in ("Name", "Type", "Params")]
        widths = [max(map(len, column), default=0) for column in shown]
        lines = []
        for name, kind, count in zip(*shown, strict=True):
            lines.append(f"  {name:{widths[0]}}  {kind:{widths[1]}}  {count.strip():>{widths[2]}}")
        total = get_human_readable_count(total_parameters).strip()
        trained = get_human_readable_count(trainable_parameters).strip()
        heading = f"Parameters: {total}, of which {trained} are trained ({model_size:.1f} MB)"
        rank_zero_info("\n".join([heading, *lines]))
