//! A line of styled text. Text from a corpus or a file name can never control the terminal: control and format characters
//! are escaped when a span is created. Widths are in terminal cells.

use anstyle::{AnsiColor, RgbColor, Style};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// The meaning of a piece of text, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Unstyled.
    Plain,
    /// Headings and results.
    Strong,
    /// Labels, units and other secondary text.
    Dim,
    /// Done, passed.
    Good,
    /// Errors and faults.
    Bad,
    /// Items that stand out in a list.
    Accent,
    /// Tokens of group 0.
    GroupZero,
    /// Tokens of group 1.
    GroupOne,
    /// Bars of charts.
    Bar,
    /// A half block: the RGB colour of the upper pixel, and of the lower one if there is one.
    Pixels([u8; 3], Option<[u8; 3]>),
}

impl Tone {
    fn style(self) -> Style {
        let colour = |c: AnsiColor| Style::new().fg_color(Some(c.into()));
        match self {
            Self::Plain => Style::new(),
            Self::Strong => Style::new().bold(),
            Self::Dim => Style::new().dimmed(),
            Self::Good => colour(AnsiColor::Green).bold(),
            Self::Bad => colour(AnsiColor::Red).bold(),
            Self::Accent => colour(AnsiColor::Yellow).bold(),
            Self::GroupZero => colour(AnsiColor::Cyan),
            Self::GroupOne => colour(AnsiColor::Magenta),
            Self::Bar => colour(AnsiColor::Blue),
            Self::Pixels(above, below) => {
                let colour = |[r, g, b]: [u8; 3]| Some(RgbColor(r, g, b).into());
                Style::new().fg_color(colour(above)).bg_color(below.and_then(colour))
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Span {
    tone: Tone,
    text: String,
}

/// A line of styled text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Line(Vec<Span>);

impl Line {
    pub fn new() -> Self {
        Self::default()
    }

    /// A line of unstyled text.
    pub fn plain(text: impl AsRef<str>) -> Self {
        Self::new().with(Tone::Plain, text)
    }

    /// Returns the line with more text.
    #[must_use]
    pub fn with(mut self, tone: Tone, text: impl AsRef<str>) -> Self {
        self.push(tone, text);
        self
    }

    /// Appends text and escapes it.
    pub fn push(&mut self, tone: Tone, text: impl AsRef<str>) {
        let text = escaped(text.as_ref());
        match self.0.last_mut() {
            Some(last) if last.tone == tone => last.text.push_str(&text),
            _ => self.0.push(Span { tone, text }),
        }
    }

    /// Appends another line's text.
    pub fn append(&mut self, other: Line) {
        self.0.extend(other.0);
    }

    /// Width in terminal cells.
    pub fn width(&self) -> usize {
        self.0.iter().map(|s| s.text.width()).sum()
    }

    /// Cuts the line to at most `cells` cells; a cut line ends in `…`.
    #[must_use]
    pub fn cut(self, cells: usize) -> Self {
        if self.width() <= cells {
            return self;
        }
        let mut out = Line::new();
        let mut left = cells.saturating_sub(1);
        for span in self.0 {
            let mut kept = String::new();
            let mut full = false;
            for c in span.text.chars() {
                let width = c.width().unwrap_or(0);
                if width > left {
                    full = true;
                    break;
                }
                left -= width;
                kept.push(c);
            }
            if full {
                kept.push('…');
            }
            out.0.push(Span { tone: span.tone, text: kept });
            if full {
                break;
            }
        }
        out
    }

    /// Appends the text to `out`, with or without colours.
    pub fn write(&self, colour: bool, out: &mut String) {
        for span in &self.0 {
            if colour && span.tone != Tone::Plain {
                let style = span.tone.style();
                out.push_str(&format!("{style}{}{style:#}", span.text));
            } else {
                out.push_str(&span.text);
            }
        }
    }
}

/// Makes every character visible: control characters, escapes, and characters that change the direction of text become
/// `\n`, `\u{1b}`, `\u{202e}`.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if shows(c) { out.push(c) } else { out.extend(c.escape_debug()) }
    }
    out
}

/// A token in quotes, which shows its spaces and quotes.
pub fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn shows(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // `str::escape_debug` knows which characters are printable, and accepts combining marks only after another
    // character
    let mut buffer = [b'a'; 5];
    let end = 1 + c.encode_utf8(&mut buffer[1..]).len();
    std::str::from_utf8(&buffer[..end]).is_ok_and(|s| s.escape_debug().nth(1) == Some(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_by_cells() {
        assert_eq!(Line::plain("漢字漢字").cut(6), Line::plain("漢字…"));
        assert_eq!(Line::plain("漢字漢字").cut(8), Line::plain("漢字漢字"));
        let line = Line::plain("ab").with(Tone::Dim, "cd").cut(3);
        assert_eq!(line.width(), 3);
    }
}
