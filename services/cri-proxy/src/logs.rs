//! `ContainerLogs`: reads log files for node-api, which has no root.
//!
//! The runtime reports the path of a log. The file is opened beneath the log directory without following
//! links, so that no other file of the host can be read. A follower continues through rotations. It ends when
//! the container has terminated and the log is read.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::Watcher as _;
use prost::Message as _;
use quintlet_cri_api::v1;
use quintlet_crilog::follow::{Followed, LINGER, ReadOutcome};
use quintlet_kit::beneath::Dir;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::contain::{self, contained_request};
use quintlet_kit::messages::Bounded;
use quintlet_kit::{failpoint, queue, task};
use quintlet_proto::runtime::v1 as pb;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::budget::Reservation;
use crate::forward::{Call, Forwarder};
use crate::policy::{self, CallDecision, RUNTIME, Socket};
use crate::reply;
use crate::request_info::RequestInfo;
use crate::services::request_headers;

/// Maximum number of concurrent readers: the number of connections of node-api.
const READERS: usize = 1024;
/// Number of blocks that are queued for a reader.
const QUEUE: usize = 4;
/// Interval at which a follower checks the log and the container's state without a notification.
const POLL: Duration = Duration::from_secs(1);

type Chunk = Result<pb::LogChunk, Status>;

/// Reads container logs.
#[derive(Debug, Clone)]
pub(crate) struct ContainerLogs {
    forwarder: Arc<Forwarder>,
    readers: Arc<Semaphore>,
    /// `podLogsDir`. Logs outside of it are not read.
    root: Arc<Path>,
}

impl ContainerLogs {
    /// Creates a reader of logs in the directory `root`.
    #[must_use]
    pub(crate) fn new(forwarder: Arc<Forwarder>, root: &Path) -> Self {
        Self { forwarder, readers: Arc::new(Semaphore::new(READERS)), root: root.into() }
    }

    async fn status(&self, id: &str) -> Result<v1::ContainerStatus, Status> {
        let CallDecision::Forward(policy) = policy::decide(Socket::Admin, RUNTIME, "ContainerStatus") else {
            return Err(Status::internal("ContainerStatus is not in the table"));
        };
        let request = v1::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        let call = Call {
            policy,
            headers: request_headers(),
            body: reply::frame(&request),
            info: RequestInfo::default(),
            budget: self.forwarder.budget(Socket::NodeApi),
            held: Reservation::default(),
            short_output: None,
        };
        let answer = self.forwarder.run(&call).await;
        let status = answer.status();
        if status.code() != Code::Ok {
            return Err(Status::new(status.code(), status.message()));
        }
        let internal = |e: &dyn std::error::Error| Status::internal(e.to_string());
        let message = reply::unframe(&answer.data.concat().into()).map_err(|e| internal(&e))?;
        let answer = v1::ContainerStatusResponse::decode(message).map_err(|e| internal(&e))?;
        answer.status.ok_or_else(|| Status::internal("the runtime returned no status"))
    }

    /// Returns whether the container is running. An error of the runtime counts as running.
    async fn still_runs(&self, id: &str) -> bool {
        match self.status(id).await {
            Ok(status) => status.state() == v1::ContainerState::ContainerRunning,
            Err(status) => status.code() != Code::NotFound,
        }
    }
}

#[tonic::async_trait]
impl pb::container_logs_server::ContainerLogs for ContainerLogs {
    type ReadStream = Bounded<pb::LogChunk>;

    async fn read(&self, request: Request<pb::ReadLogRequest>) -> Result<Response<Self::ReadStream>, Status> {
        let pb::ReadLogRequest { container_id, tail_lines, follow } = request.into_inner();
        let permit = self.readers.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Status::resource_exhausted("too many logs are being read"))?;
        let status = self.status(&container_id).await?;
        if status.log_path.is_empty() {
            return Err(Status::not_found(format!("container {container_id:?} has no log")));
        }
        let path = PathBuf::from(status.log_path);
        let log = open(self.root.clone(), path.clone(), tail_lines).await?;
        let (chunks, receiver) = queue::channel("log-chunks", QUEUE);
        let reader =
            Reader { logs: self.clone(), container_id, path, log: Some(log), chunks, _permit: permit };
        let (pod, failed) = (contain::current(), reader.chunks.clone());
        drop(task::spawn("log-reader", async move {
            let reading = async { if follow { reader.follow().await } else { reader.once().await } };
            // A truncated log must not look complete.
            if let Err(panic) = contained_request(pod, reading).await {
                let _ = failed.send(Err(Status::internal(format!("cri-proxy {panic}")))).await;
            }
        }));
        Ok(Response::new(Bounded::new("ContainerLogs.Read", ReceiverStream::new(receiver))))
    }
}

/// Opens a log beneath `root`. Finding the last lines of a large file may take long, so this runs on a
/// blocking thread.
async fn open(root: Arc<Path>, path: PathBuf, tail: Option<u64>) -> Result<Followed, Status> {
    let opening = move || {
        failpoint::work!("log opened");
        let opened = Dir::open(&root).and_then(|root| Followed::open_beneath(&root, &path, tail));
        opened.map_err(|error| {
            let (code, what) = match error.kind() {
                std::io::ErrorKind::NotFound => (Code::NotFound, "try resolving symlinks in path"),
                _ => (Code::Internal, "open log file"),
            };
            Status::new(code, format!("failed to {what} {:?}: {error}", path.display().to_string()))
        })
    };
    task::blocking(opening).await
}

struct Reader {
    logs: ContainerLogs,
    container_id: String,
    path: PathBuf,
    /// Taken while a block is read.
    log: Option<Followed>,
    chunks: mpsc::Sender<Chunk>,
    _permit: OwnedSemaphorePermit,
}

impl Reader {
    async fn once(mut self) {
        // The client may have disconnected.
        let _ = self.drain(false).await;
    }

    async fn follow(mut self) {
        let grown = Arc::new(Notify::new());
        let (path, wake) = (self.path.clone(), Arc::clone(&grown));
        let _watcher = task::blocking(move || watch(&path, &wake)).await;
        let mut next_question = deadline_after(Instant::now(), POLL);
        let mut ended = false;
        loop {
            let Some(rotating) = self.drain(true).await else { return };
            if ended && !rotating {
                return;
            }
            let wake = if rotating {
                next_question.min(deadline_after(Instant::now(), LINGER))
            } else {
                next_question
            };
            // All arms only wait.
            tokio::select! {
                () = grown.notified() => {}
                () = tokio::time::sleep_until(wake) => {}
                () = self.chunks.closed() => return,
            }
            if Instant::now() >= next_question {
                // A terminated container has written all of its log, so one more read is enough.
                ended = !self.logs.still_runs(&self.container_id).await;
                next_question = deadline_after(Instant::now(), POLL);
            }
        }
    }

    /// Sends what can be read. Returns whether a rotation is in progress, or none if the client has
    /// disconnected.
    async fn drain(&mut self, through: bool) -> Option<bool> {
        loop {
            let mut log = self.log.take()?;
            let now = Instant::now().into_std();
            let reading = task::blocking(move || {
                failpoint::work!("log read");
                let mut data = Vec::new();
                let step = if through { log.read(now, &mut data) } else { log.read_here(&mut data) };
                (log, step, data)
            });
            let (log, step, data) = reading.await;
            self.log = Some(log);
            let chunk = match step {
                Ok(ReadOutcome::Dry { rotating }) => return Some(rotating),
                Ok(ReadOutcome::Data) => Ok(pb::LogChunk { data }),
                Err(error) => Err(Status::internal(format!("failed to read log file: {error}"))),
            };
            let failed = chunk.is_err();
            if self.chunks.send(chunk).await.is_err() || failed {
                return None;
            }
        }
    }
}

/// Notifies on changes in the directory of the log. Without a watcher, the log is checked every second.
fn watch(log: &Path, grown: &Arc<Notify>) -> Option<notify::RecommendedWatcher> {
    let wake = grown.clone();
    let woken = move |_: notify::Result<notify::Event>| wake.notify_one();
    // Without reads, which would cause a loop.
    let changes = notify::Config::default().with_event_kinds(notify::EventKindMask::CORE);
    let mut watcher = notify::RecommendedWatcher::new(woken, changes).ok()?;
    watcher.watch(log.parent()?, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}
