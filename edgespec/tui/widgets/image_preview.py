"""Image previews drawn with half blocks: each character cell shows two pixels, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from edgespec.errors import AttachmentError
from edgespec.tui.background import CallThread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgespec.model.image import Image

# Maximum width and height of a preview in cells, and maximum number of images shown per message.
_MAX_COLUMNS, _MAX_ROWS, _MAX_IMAGES = 120, 12, 8
_GAP_COLUMNS = 2
# Colour systems of terminals with at least 256 colours.
_COLOURFUL = ("256", "truecolor")
_UPPER_HALF = "▀"

# Decodes one image at a time, so that a chat with many photos needs little memory.
_decoder = CallThread()
# Images reduced to the size of their largest preview.
_reduced: WeakKeyDictionary[Image, NDArray[np.uint8]] = WeakKeyDictionary()


class _Place(NamedTuple):
    """An image and the cells that it occupies. `pixels` is its height in pixels."""

    image: Image
    row: int
    column: int
    columns: int
    pixels: int

    @property
    def end_row(self) -> int:
        return self.row + (self.pixels + 1) // 2


class ImagePreview(Widget, can_focus=False):
    """The images of a message side by side, or their names and sizes if the terminal has too few colours.

    The widget has its final size immediately, but stays empty until another thread has decoded the images.

    Args:
        images: The images.
    """

    ALLOW_SELECT = False

    def __init__(self, images: Sequence[Image]) -> None:
        super().__init__()
        self._images = images[:_MAX_IMAGES]
        # The drawn rows of each image, keyed by its place and the background colour behind transparent parts.
        self._drawn: dict[tuple[_Place, Color], list[list[Segment]]] = {}

    def on_mount(self) -> None:
        if _has_colours(self.app):
            self.run_worker(self._decode())

    async def _decode(self) -> None:
        for image in self._images:
            if image not in _reduced:
                _reduced[image] = await _decoder.run(partial(_largest, image))
        self.refresh()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        if not _has_colours(self.app):
            return len(self._images)
        return max(place.end_row for place in self._places(width))

    def _places(self, width: int) -> list[_Place]:
        """Return the positions of the images, laid out from left to right and from top to bottom."""
        places: list[_Place] = []
        row = column = 0
        for image in self._images:
            columns, pixels = _fitted(image, width)
            if column and column + columns > width:
                row, column = max(place.end_row for place in places) + 1, 0
            places.append(_Place(image, row, column, columns, pixels))
            column += columns + _GAP_COLUMNS
        return places

    def render_line(self, y: int) -> Strip:
        width, style = self.content_size.width, self.rich_style
        segments: list[Segment] = []
        if not _has_colours(self.app):
            segments.append(Segment(self._images[y].label, style))
        end = 0
        for place in self._places(width) if not segments else ():
            if place.row <= y < place.end_row and place.image in _reduced:
                segments.append(Segment(" " * (place.column - end), style))
                segments += self._rows(place)[y - place.row]
                end = place.column + place.columns
        return Strip(segments).adjust_cell_length(width, style)

    def _rows(self, place: _Place) -> list[list[Segment]]:
        background = self.background_colors[1].rich_color
        if (place, background) not in self._drawn:
            pixels = _resized(_reduced[place.image], place.columns, place.pixels)
            self._drawn[place, background] = _half_blocks(pixels, background)
        return self._drawn[place, background]


def _has_colours(app: App[object]) -> bool:
    return not app.no_color and app.console.color_system in _COLOURFUL


def _fitted(image: Image, max_columns: int) -> tuple[int, int]:
    """Return the width and height of an image's preview in pixels. Small images are not enlarged."""
    scale = min(1, min(max_columns, _MAX_COLUMNS) / image.width, 2 * _MAX_ROWS / image.height)
    return max(1, int(image.width * scale)), max(1, int(image.height * scale))


def _largest(image: Image) -> NDArray[np.uint8]:
    """Return an image at the size of its largest preview. A damaged image becomes transparent."""
    import numpy as np

    size = _fitted(image, _MAX_COLUMNS)
    try:
        return image.reduced(*size)
    except AttachmentError:
        return np.zeros((size[1], size[0], 4), np.uint8)


def _resized(pixels: NDArray[np.uint8], columns: int, height: int) -> NDArray[np.uint8]:
    """Scale a reduced image down further to fit a narrower terminal."""
    import numpy as np
    import PIL.Image

    if pixels.shape[:2] == (height, columns):
        return pixels
    return np.asarray(PIL.Image.fromarray(pixels).resize((columns, height)))


def _half_blocks(pixels: NDArray[np.uint8], background: Color) -> list[list[Segment]]:
    """Return rows of half-block cells that show the pixels [height, width, 4] on a background."""
    import numpy as np

    behind = np.array(background.get_truecolor(), np.float32)
    opacity = pixels[..., 3:] / np.float32(255)
    colours = np.rint(pixels[..., :3] * opacity + behind * (1 - opacity))
    if len(colours) % 2:
        # The height is odd, so fill the lower half of the last row of cells with the background.
        colours = np.concatenate([colours, np.broadcast_to(behind, colours[:1].shape)])
    triples = colours.astype(int).tolist()
    return [
        [_cells(len([*run]), *pair) for pair, run in groupby(zip(upper, lower, strict=True))]
        for upper, lower in zip(triples[::2], triples[1::2], strict=True)
    ]


def _cells(count: int, upper: Sequence[int], lower: Sequence[int]) -> Segment:
    # This is faster than Rich's other ways of creating a style.
    style = Style.from_color(Color.from_rgb(*upper), Color.from_rgb(*lower))
    return Segment(_UPPER_HALF * count, style)
