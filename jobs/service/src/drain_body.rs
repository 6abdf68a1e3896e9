//! Reads and discards the rest of a request that is already answered, so that the client receives the answer.
//!
//! ```text
//!   body not read to its end ─► answer, Connection: close ─► end of the answer ─► discard: 64 MB, a time limit ─► close
//! ```
//!
//! A server that closes a connection with unread data, or that receives data afterwards, causes a reset (RFC 9112,
//! section 9.6). A client that sends its whole body before it reads would then see a broken connection. It would not see
//! the error of a job file that is too large.

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

/// Most bytes to discard of one request; about 60 job files of the default limit.
const MAX_BYTES: usize = 64_000_000;
const BUFFER_BYTES: usize = 16 << 10;

/// Whether part of a connection's last request is unread.
#[derive(Debug, Clone, Default)]
pub struct UnreadBody(Arc<AtomicBool>);

impl UnreadBody {
    /// Tracks how far the body of a request is read.
    pub fn track<B>(&self, request: Request<B>) -> Request<Body>
    where
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
    {
        self.0.store(!request.body().is_end_stream(), Ordering::Relaxed);
        request.map(|body| Body::new(TrackedBody { body, unread: self.clone() }))
    }

    /// Whether the end of the body has not been read.
    pub fn is_unread(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `Connection: close` to the answer if part of the request is unread.
    pub fn close_if_unread(&self, mut answer: Response<Body>) -> Response<Body> {
        if self.is_unread() {
            answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }
}

struct TrackedBody<B> {
    body: B,
    unread: UnreadBody,
}

impl<B: HttpBody + Unpin> HttpBody for TrackedBody<B> {
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

/// Ends the connection's answers and discards incoming data. Stops when the client closes, sends nothing for
/// `limits.header_seconds`, or has used `limits.body_seconds` or 64 MB.
pub async fn discard_rest(stream: &mut TcpStream, limits: &Limits) {
    let idle = Duration::from_secs(limits.header_seconds.into());
    let total = Duration::from_secs(limits.body_seconds.into());
    // a client that has gone sends nothing more
    if stream.shutdown().await.is_err() {
        return;
    }
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut remaining = MAX_BYTES;
    let all = async {
        while remaining > 0
            && let Ok(Ok(read @ 1..)) = timeout(idle, stream.read(&mut buffer)).await
        {
            remaining = remaining.saturating_sub(read);
        }
    };
    // the connection closes now in either case
    let _ = timeout(total, all).await;
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full, Limited};

    use super::*;

    fn tracked(unread: &UnreadBody, text: &'static str) -> Body {
        unread.track(Request::new(Full::from(text))).into_body()
    }

    fn says_close(unread: &UnreadBody) -> bool {
        unread.close_if_unread(Response::default()).headers().contains_key(header::CONNECTION)
    }

    #[tokio::test]
    async fn a_body_is_unread_until_its_end() {
        let unread = UnreadBody::default();
        assert!(!unread.is_unread() && !says_close(&unread));
        let body = tracked(&unread, "twelve bytes");
        assert_eq!(body.size_hint().exact(), Some(12));
        assert!(unread.is_unread() && says_close(&unread));
        assert_eq!(body.collect().await.unwrap().to_bytes(), "twelve bytes");
        assert!(!unread.is_unread() && !says_close(&unread));
        // a body refused halfway, and a body that was never read
        assert!(Limited::new(tracked(&unread, "twelve bytes"), 11).collect().await.is_err());
        assert!(unread.is_unread());
        drop(tracked(&unread, ""));
        assert!(!unread.is_unread());
        drop(tracked(&unread, "twelve bytes"));
        assert!(unread.is_unread());
    }
}
