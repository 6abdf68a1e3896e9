//! What a client still sends of a request that is answered already: taken and thrown away for a while, so that it reads the answer.
//!
//! ```text
//!   body not read to its end ─► answer, Connection: close ─► end of the answer ─► taken: 64 MB, so many seconds ─► closed
//! ```
//!
//! A connection that is closed while something of it is unread, or is sent to afterwards, is reset (RFC 9112, section 9.6): who sends a
//! whole body before reading anything would hear of a broken connection, not of a job file that is too large.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Request, Response, header};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::config::Limits;

/// Most that is thrown away of one request; a job file of the default limit is a sixtieth of it.
const MOST_BYTES: usize = 64_000_000;
const PIECE_BYTES: usize = 16 << 10;

/// Whether something of a connection's last request is unread.
#[derive(Debug, Clone, Default)]
pub struct Unread(Arc<AtomicBool>);

impl Unread {
    /// Watches how far the body of a request is read.
    pub fn watch<B>(&self, request: Request<B>) -> Request<Body>
    where
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
    {
        self.0.store(!request.body().is_end_stream(), Ordering::Relaxed);
        request.map(|body| Body::new(Watched { body, unread: self.clone() }))
    }

    /// Whether its end has not been read.
    pub fn is_left(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Says in an answer that no other one follows it, where what is unread would have to come before that.
    pub fn close(&self, mut answer: Response<Body>) -> Response<Body> {
        if self.is_left() {
            answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }
}

struct Watched<B> {
    body: B,
    unread: Unread,
}

impl<B: HttpBody + Unpin> HttpBody for Watched<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() {
            self.unread.0.store(false, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Ends the answers of a connection and throws away what still comes, until the client closes it, sends nothing for `limits.header_seconds`,
/// or has had `limits.body_seconds` or sent 64 MB.
pub async fn throw_away(stream: &mut TcpStream, limits: &Limits) {
    let silence = Duration::from_secs(limits.header_seconds.into());
    let whole = Duration::from_secs(limits.body_seconds.into());
    // who has gone sends nothing more
    if stream.shutdown().await.is_err() {
        return;
    }
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = MOST_BYTES;
    let all = async {
        while left > 0
            && let Ok(Ok(taken @ 1..)) = timeout(silence, stream.read(&mut piece)).await
        {
            left = left.saturating_sub(taken);
        }
    };
    // over or not, it is closed now
    let _ = timeout(whole, all).await;
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full, Limited};

    use super::*;

    fn watched(unread: &Unread, text: &'static str) -> Body {
        unread.watch(Request::new(Full::from(text))).into_body()
    }

    fn says_close(unread: &Unread) -> bool {
        unread.close(Response::default()).headers().contains_key(header::CONNECTION)
    }

    #[tokio::test]
    async fn a_body_is_unread_until_its_end() {
        let unread = Unread::default();
        assert!(!unread.is_left() && !says_close(&unread));
        let body = watched(&unread, "twelve bytes");
        assert_eq!(body.size_hint().exact(), Some(12));
        assert!(unread.is_left() && says_close(&unread));
        assert_eq!(body.collect().await.unwrap().to_bytes(), "twelve bytes");
        assert!(!unread.is_left() && !says_close(&unread));
        // one that is refused on the way, and one that nobody looked at
        assert!(Limited::new(watched(&unread, "twelve bytes"), 11).collect().await.is_err());
        assert!(unread.is_left());
        drop(watched(&unread, ""));
        assert!(!unread.is_left());
        drop(watched(&unread, "twelve bytes"));
        assert!(unread.is_left());
    }
}
