//! Checksums of a shard: those of its pages, stored in its Parquet metadata, and that of its end, stored in the
//! manifest.
//!
//! The page checksums are one `bytes:crc32` per page, separated by spaces, in file order: from byte [`FIRST_PAGE`]
//! without gaps up to the footer. A page is its header and its data, so the checksum covers both; dictionary pages
//! count as pages. CRC-32 is that of zlib (IEEE 802.3), in eight hexadecimal digits; the number of bytes is decimal.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// Metadata key of the page checksums.
pub const PAGES: &str = "stillhouse.pages";
/// Offset of the first page of a shard, after the four bytes `PAR1`.
pub const FIRST_PAGE: u64 = 4;

/// Size and checksum of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSum {
    /// Bytes of the page: header and data.
    pub bytes: u64,
    /// CRC-32 of these bytes.
    pub crc32: u32,
}

/// The end of a shard: everything after the last page, that is page indexes and footer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FooterRecord {
    /// Number of bytes.
    pub bytes: u64,
    /// SHA-256 of these bytes.
    pub sha256: String,
}

/// Formats the page checksums of a shard.
pub fn render(pages: &[PageSum]) -> String {
    let mut text = String::with_capacity(pages.len() * 16);
    for (i, PageSum { bytes, crc32 }) in pages.iter().enumerate() {
        let space = if i > 0 { " " } else { "" };
        let _ = write!(text, "{space}{bytes}:{crc32:08x}"); // writing to a string cannot fail
    }
    text
}

/// Parses the page checksums of a shard; `None` if the text is invalid.
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
