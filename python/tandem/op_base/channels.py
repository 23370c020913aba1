"""Extra inputs and outputs of an op, and the channels that connect them inside a pipeline."""

from __future__ import annotations

from typing_extensions import Self


class ChannelsMixin:
    """The channels of an op's extra inputs and outputs. They are fixed once a pipeline has captured the op."""

    def _init_channels(self, inputs: int, outputs: int) -> None:
        self._extra_input_channels: list[str | None] = [None] * inputs
        self._extra_output_channels: list[str | None] = [None] * outputs
        self._extra_output_to_caller: list[bool] = [True] * outputs
        self._extra_tensor_channels_locked = False

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Reads extra input `index` from the op that writes `channel`; None: from the caller, which is the default.

        Args:
            index: index of the extra input, from 0.
            channel: channel of an extra output of an earlier op, or None.
        """
        self._check_channel("input", index, len(self._extra_input_channels), channel)
        self._check_unlocked()
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Passes extra output `index` to the ops that read `channel`, and by default to the caller too; None: only to the caller.

        Args:
            index: index of the extra output, from 0.
            channel: channel of extra inputs of later ops, or None.
            output_to_caller: whether the extra output is a result of the pipeline too.
        """
        self._check_channel("output", index, len(self._extra_output_channels), channel)
        if type(output_to_caller) is not bool:
            raise TypeError(
                f"{self._name()}: expected True or False, as output_to_caller must be a bool, got {output_to_caller!r}. Pass a bool."
            )
        self._check_unlocked()
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller if channel is not None else True
        return self

    def channel_bindings(self) -> tuple:
        """(channel of each extra input), ((channel, whether the caller gets it) of each extra output)."""
        return tuple(self._extra_input_channels), tuple(
            zip(self._extra_output_channels, self._extra_output_to_caller, strict=True)
        )

    def lock_channels(self) -> None:
        """Fixes the channels, because a pipeline was planned with them."""
        self._extra_tensor_channels_locked = True

    def _name(self) -> str:
        return type(self).__qualname__

    def _check_channel(self, what: str, index: int, count: int, channel: str | None) -> None:
        if not 0 <= index < count:
            raise IndexError(
                f"{self._name()}: expected the index of one of its {count} extra {what}s, got {index}, which is out of range. They are counted "
                "from 0."
            )
        if channel is not None and not (isinstance(channel, str) and channel):
            raise ValueError(
                f"{self._name()}: expected channel to be a non-empty string or None, got {channel!r}. None unbinds the extra {what}."
            )
        if channel is not None and any("\ud800" <= character <= "\udfff" for character in channel):
            raise ValueError(
                f"{self._name()}: expected channel to be text that UTF-8 can encode, got {channel!r}. Leave out surrogates."
            )

    def _check_unlocked(self) -> None:
        if self._extra_tensor_channels_locked:
            raise RuntimeError(
                f"{self._name()}: expected an op in no pipeline yet, got one of which a pipeline has already captured its channel routing. Bind "
                "channels before the first call."
            )
