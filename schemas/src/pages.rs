//! The checksums of a shard: those of its pages, as they stand in its Parquet metadata, and that of its end, as it stands in the manifest.
//!
//! Of the pages, one `bytes:crc32` for each page, between spaces, in the order in which the pages lie in the file: from byte [`FIRST_PAGE`] on, without gaps, up to the
//! footer. A page is its header and what follows it, so the sums cover both, and dictionary pages are pages. CRC-32 is that of zlib (IEEE 802.3), in
//! eight hexadecimal digits; the number of bytes is decimal.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// Metadata key of the checksums.
pub const PAGES: &str = "stillhouse.pages";
/// Where the first page of a shard begins: behind the four letters `PAR1`.
pub const FIRST_PAGE: u64 = 4;

/// Size and checksum of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSum {
    /// Bytes of its header and of what follows it.
    pub bytes: u64,
    /// CRC-32 of them all.
    pub crc32: u32,
}

/// The end of a shard: everything behind its last page, which is page indexes and footer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FooterRecord {
    /// How many bytes.
    pub bytes: u64,
    /// Their checksum.
    pub sha256: String,
}

/// The pages of a shard as text.
pub fn render(pages: &[PageSum]) -> String {
    let mut text = String::with_capacity(pages.len() * 16);
    for (i, PageSum { bytes, crc32 }) in pages.iter().enumerate() {
        let space = if i > 0 { " " } else { "" };
        let _ = write!(text, "{space}{bytes}:{crc32:08x}"); // into a string: cannot fail
    }
    text
}

/// The pages of a shard from text; `None` where it is none of ours.
pub fn parse(text: &str) -> Option<Vec<PageSum>> {
    let one = |entry: &str| {
        let (bytes, crc32) = entry.split_once(':')?;
        Some(PageSum { bytes: bytes.parse().ok()?, crc32: u32::from_str_radix(crc32, 16).ok()? })
    };
    text.split_ascii_whitespace().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let pages = [PageSum { bytes: 1843, crc32: 0x00ff_12ab }, PageSum { bytes: 7, crc32: u32::MAX }];
        let text = render(&pages);
        assert_eq!(text, "1843:00ff12ab 7:ffffffff");
        assert_eq!(parse(&text).unwrap(), pages);
        assert_eq!(parse("").unwrap(), []);
        for wrong in ["1843", "1843:", ":12", "-1:12", "7:123456789", "a:b"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
