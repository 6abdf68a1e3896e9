//! `strftime_now` for a fixed date at midnight: templates never see the clock.

/// A day of the proleptic Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Date {
    year: u32,
    month: u32,
    day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Date {
    /// Parses `YYYY-MM-DD`.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = |range: std::ops::Range<usize>| -> Option<u32> {
            let part = text.get(range)?;
            part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok())?
        };
        if text.len() != 10 || text.get(4..5) != Some("-") || text.get(7..8) != Some("-") {
            return None;
        }
        let date = Self { year: digits(0..4)?, month: digits(5..7)?, day: digits(8..10)? };
        let valid = date.year >= 1 && (1..=12).contains(&date.month) && (1..=date.month_days()).contains(&date.day);
        valid.then_some(date)
    }

    fn is_leap(self) -> bool {
        (self.year.is_multiple_of(4) && !self.year.is_multiple_of(100)) || self.year.is_multiple_of(400)
    }

    fn month_days(self) -> u32 {
        match self.month {
            2 if self.is_leap() => 29,
            2 => 28,
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    /// Day of the year, from 1.
    fn year_day(self) -> u32 {
        (1..self.month).map(|month| Self { month, ..self }.month_days()).sum::<u32>() + self.day
    }

    /// Day of the week, 0 is Sunday.
    fn week_day(self) -> u32 {
        let years = self.year - 1;
        (years * 365 + years / 4 - years / 100 + years / 400 + self.year_day()) % 7
    }

    /// Python's `strftime` in the C locale, of midnight. The error is a directive that is not supported.
    pub fn format(self, pattern: &str) -> Result<String, String> {
        let mut text = String::new();
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut directive = chars.next().unwrap_or('%');
            let plain = directive == '-';
            if plain {
                directive = chars.next().unwrap_or('%');
            }
            let number = |value: u32, width: usize| match plain {
                true => value.to_string(),
                false => format!("{value:0width$}"),
            };
            let month = MONTHS[self.month as usize - 1];
            let day = DAYS[self.week_day() as usize];
            text.push_str(&match directive {
                'Y' => number(self.year, if self.year < 1000 { 1 } else { 4 }),
                'y' => number(self.year % 100, 2),
                'm' => number(self.month, 2),
                'd' => number(self.day, 2),
                'e' => format!("{:>2}", self.day),
                'j' => number(self.year_day(), 3),
                'B' => month.to_string(),
                'b' | 'h' => month[..3].to_string(),
                'A' => day.to_string(),
                'a' => day[..3].to_string(),
                'w' => self.week_day().to_string(),
                'u' => (if self.week_day() == 0 { 7 } else { self.week_day() }).to_string(),
                'H' | 'M' | 'S' => number(0, 2),
                'I' => "12".to_string(),
                'p' => "AM".to_string(),
                'f' => "000000".to_string(),
                'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
                'D' | 'x' => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year % 100),
                'T' | 'X' => "00:00:00".to_string(),
                'R' => "00:00".to_string(),
                'Z' | 'z' => String::new(),
                'n' => "\n".to_string(),
                't' => "\t".to_string(),
                '%' => "%".to_string(),
                other => return Err(format!("%{other}")),
            });
        }
        Ok(text)
    }
}
