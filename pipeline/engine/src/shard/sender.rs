//! Uploads a shard while more of it is encoded. One piece at a time is being sent, on the request runtime.

use bytes::Bytes;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::{Output, ShardUpload, Staged};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

type SendResult = (Box<ShardUpload>, object_store::Result<()>);

/// An upload in progress.
pub struct Sender {
    requests: Handle,
    state: State,
}

enum State {
    Idle(Box<ShardUpload>),
    Sending(JoinHandle<SendResult>),
    /// A task that panicked took the upload with it.
    Lost,
}

impl Sender {
    /// Begins the upload of a shard.
    pub async fn begin(requests: &Handle, output: &Output, shard: &str) -> Result<Self> {
        let (output, shard) = (output.clone(), shard.to_owned());
        let begun = requests.spawn(async move { output.upload(&shard).await }).await;
        let upload =
            begun.map_err(|_| PipelineError::new(ErrorKind::Output, "an upload stopped: a bug in this program"))??;
        Ok(Self::new(requests, upload))
    }

    pub fn new(requests: &Handle, upload: ShardUpload) -> Self {
        Self { requests: requests.clone(), state: State::Idle(Box::new(upload)) }
    }

    /// Waits for the piece being sent, then returns the upload.
    async fn upload(&mut self) -> object_store::Result<Box<ShardUpload>> {
        match std::mem::replace(&mut self.state, State::Lost) {
            State::Idle(upload) => Ok(upload),
            State::Sending(task) => {
                let (upload, sent) = task.await.map_err(|source| object_store::Error::JoinError { source })?;
                match sent {
                    Ok(()) => Ok(upload),
                    Err(e) => {
                        self.state = State::Idle(upload);
                        Err(e)
                    }
                }
            }
            State::Lost => Err(object_store::Error::Generic {
                store: "upload",
                source: "it has ended: a bug in this program".into(),
            }),
        }
    }

    /// Sends bytes after waiting for the previous piece, whose error it may return.
    pub async fn send(&mut self, bytes: Bytes) -> object_store::Result<()> {
        let mut upload = self.upload().await?;
        self.state = State::Sending(self.requests.spawn(async move {
            let sent = upload.put(bytes).await;
            (upload, sent)
        }));
        Ok(())
    }

    /// Sends the rest. The shard is then complete but not committed.
    pub async fn finish(mut self) -> object_store::Result<Staged> {
        match self.upload().await {
            Ok(upload) => {
                let finished = self.requests.spawn(upload.finish()).await;
                finished.map_err(|source| object_store::Error::JoinError { source })?
            }
            Err(e) => {
                self.abort().await;
                Err(e)
            }
        }
    }

    /// Aborts the upload and removes what was sent.
    pub async fn abort(mut self) {
        // The caller of `send` has received this error already, or it no longer matters.
        let upload = match self.upload().await {
            Ok(upload) => Some(upload),
            Err(_) => match self.state {
                State::Idle(upload) => Some(upload),
                State::Sending(_) | State::Lost => None,
            },
        };
        if let Some(upload) = upload {
            let _ = self.requests.spawn(upload.abort()).await;
        }
    }
}
