//! Renders an image: with colours as half blocks, two rows of pixels per line; without colours as characters from dark
//! to light.

use stillhouse_datasets::inspect::{RowView, Shape};

use crate::page::{Line, Page, Tone, View};

/// Characters from dark to light.
const RAMP: &[u8] = b" .:-=+*#%@";
/// Maximum pixels per side; larger images are scaled down.
const MAX_SIDE: usize = 96;

pub(super) fn render(row: &RowView, shape: Shape, view: View, page: &mut Page) {
    let cells = view.width.saturating_sub(4).max(8);
    // a character is about twice as high as wide
    let across = if view.colour { cells } else { cells / 2 };
    let side = across.min(MAX_SIDE);
    let step = shape.width.div_ceil(side).max(shape.height.div_ceil(MAX_SIDE)).max(1);
    let (width, height) = (shape.width.div_ceil(step), shape.height.div_ceil(step));
    let at = |x: usize, y: usize| colour(row, shape, step, (x, y));
    let rows = if view.colour { height.div_ceil(2) } else { height };
    for y in 0..rows {
        let mut line = Line::plain("  │ ");
        for x in 0..width {
            if view.colour {
                let below = (2 * y + 1 < height).then(|| at(x, 2 * y + 1));
                line.push(Tone::Pixels(at(x, 2 * y), below), "▀");
            } else {
                let [r, g, b] = at(x, y).map(u32::from);
                let light = (r * 299 + g * 587 + b * 114) / 1000;
                let character = char::from(RAMP[light as usize * (RAMP.len() - 1) / 255]);
                line.push(Tone::Plain, format!("{character}{character}"));
            }
        }
        page.line(line);
    }
}

/// Mean colour of a square of pixels.
fn colour(row: &RowView, shape: Shape, step: usize, (x, y): (usize, usize)) -> [u8; 3] {
    let (mut sum, mut count) = ([0u32; 3], 0);
    for y in (y * step..(y + 1) * step).take_while(|y| *y < shape.height) {
        for x in (x * step..(x + 1) * step).take_while(|x| *x < shape.width) {
            let first = (y * shape.width + x) * shape.channels;
            for (c, sum) in sum.iter_mut().enumerate() {
                *sum += row.tokens.get(first + c.min(shape.channels - 1)).map_or(0, |token| token.id.min(255));
            }
            count += 1;
        }
    }
    sum.map(|sum| (sum / count.max(1)) as u8)
}
