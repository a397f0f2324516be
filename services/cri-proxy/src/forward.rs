//! Forwards calls to the runtime: policy, fence, join, lane, request, trailers.
//!
//! Unary calls and lists are read and answered as a whole; other streams are passed through frame by frame. A
//! mutation runs in a task of its own, so that it completes even if its caller disconnects.
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use quintlet_kit::clock::Clock;
use quintlet_model::outcome::Outcome;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing::{Instrument as _, Span, field};

use crate::budget::ByteBudget;
use crate::completed_execs::CompletedExecs;
use crate::inflight::{InFlight, PendingReply};
use crate::lists;
use crate::metrics::{Metrics, OTHER};
use crate::orphaned_tasks::OrphanedTasks;
use crate::policy::{self, CallDecision, Class, Lane, Policy, Socket};
use crate::reply::{self, Body, Reply};
use crate::runtime_info::ConnectedRuntime;
use crate::upstream::Upstream;

mod call;
mod dispatch;
mod exec_reply;
mod listing;
mod request_body;
mod stream;
mod stream_body;
mod unary;
mod upstreams;

use dispatch::Dispatcher;
use stream::OpenedStream;
use upstreams::Upstreams;

pub use call::Call;
pub use exec_reply::MAX_OUTPUT;
pub use listing::{MAX_BUFFERED, MIN_INTERVAL};

/// Maximum size of a request: the CRI's limit of 16 MiB and the gRPC prefix.
const MAX_REQUEST: usize = (16 << 20) + 5;

/// On the socket `sync`, these are lifecycle hooks, which must not run twice.
const EXEC_SYNC: &str = "ExecSync";

/// Decides about calls, joins them and remembers their results.
pub struct Forwarder {
    dispatcher: Arc<Dispatcher>,
    in_flight: InFlight,
    completed_execs: CompletedExecs,
    runtime: ConnectedRuntime,
    /// Byte limits per socket.
    budgets: [(Socket, ByteBudget); Socket::ALL.len()],
    /// Cancelled when streams are to end.
    closing: CancellationToken,
}

impl std::fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forwarder").field("upstream", &self.dispatcher.upstreams).finish_non_exhaustive()
    }
}

impl Forwarder {
    /// Creates a forwarder to the runtime at `upstream`, with its own image service if there is one. Pods are
    /// in the containerd namespace `namespace`. `timeout` is the default time limit of a call, `byte_limit`
    /// the limit of a socket.
    #[must_use]
    pub fn new(
        upstream: Upstream,
        images: Option<Upstream>,
        namespace: &str,
        timeout: Duration,
        clock: Clock,
        metrics: Metrics,
        byte_limit: fn(Socket) -> usize,
    ) -> Self {
        let refused = &metrics.refused_bytes;
        let budgets =
            Socket::ALL.map(|socket| (socket, ByteBudget::new(byte_limit(socket), refused.clone())));
        let completed_execs = CompletedExecs::new(clock.boot());
        let orphaned_tasks = OrphanedTasks::new(upstream.clone(), namespace);
        let upstreams = Upstreams::new(upstream, images);
        Self {
            dispatcher: Arc::new(Dispatcher::new(upstreams, orphaned_tasks, timeout, clock, metrics)),
            in_flight: InFlight::default(),
            completed_execs,
            runtime: ConnectedRuntime::default(),
            budgets,
            closing: CancellationToken::new(),
        }
    }

    /// Queues and sends a unary call without a fencing token.
    pub async fn run(&self, call: &Call) -> Reply {
        self.dispatcher.run(call, None).await
    }

    /// Returns the byte budget that all connections of a socket share.
    #[must_use]
    pub fn budget(&self, socket: Socket) -> ByteBudget {
        let found = self.budgets.iter().find(|(owner, _)| *owner == socket);
        found.map(|(_, budget)| budget.clone()).expect("every socket has a budget")
    }

    /// Ends every passed-through stream with a status that names the reason.
    pub fn end_streams(&self) {
        self.closing.cancel();
    }

    /// Completes when no unary call is in progress.
    pub async fn wait_idle(&self) {
        self.dispatcher.wait_idle().await;
    }

    /// Returns the highest owner epoch that was seen.
    #[must_use]
    pub fn owner_epoch(&self) -> u64 {
        self.dispatcher.fence.highest()
    }

    /// Returns the mutations in flight.
    #[must_use]
    pub fn in_flight(&self) -> InFlight {
        self.in_flight.clone()
    }

    /// Returns the metrics that calls are counted in.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.dispatcher.metrics
    }

    /// Writes the load of the lanes to the metrics.
    pub fn observe_lanes(&self) {
        for lane in Lane::ALL {
            self.dispatcher.metrics.lane(lane, &self.dispatcher.lanes);
        }
    }

    /// Refuses a call that is not allowed on this socket, or whose method is unknown.
    pub fn refuse(&self, socket: Socket, service: &str, method: &str, known: bool) -> Response<Body> {
        self.dispatcher.metrics.denied(label(service, method), socket);
        let why = if known { "is not allowed" } else { "is unknown and not allowed" };
        let message = format!("{service}/{method} {why} on the socket {}", socket.name());
        tracing::warn!(socket = socket.name(), method = %format_args!("{service}/{method}"), "call refused");
        Reply::local(Code::PermissionDenied, message, Outcome::NotDispatched, Duration::ZERO).into_response()
    }

    /// Forwards a call according to its verdict.
    pub async fn forward(self: &Arc<Self>, socket: Socket, request: Request<Incoming>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let path = head.uri.path();
        let Some((service, method)) = policy::split_path(path) else {
            let message = format!("{path:?} is not a method");
            return Reply::local(Code::Unimplemented, message, Outcome::NotDispatched, Duration::ZERO)
                .into_response();
        };
        let (row, lane) = match policy::decide(socket, service, method) {
            CallDecision::Forward(row) => (Some(row), Some(row.lane)),
            CallDecision::Passthrough => (None, None),
            CallDecision::WrongSocket | CallDecision::Local => {
                return self.refuse(socket, service, method, true);
            }
            CallDecision::Unknown => return self.refuse(socket, service, method, false),
        };
        if let Some(row) = row
            && let Some(refusal) = self.refuse_fatal(row).await
        {
            return refusal.into_response();
        }
        let span = span(service, method, socket);
        let headers = reply::forwardable_headers(&head.headers);
        let methods = row.and_then(lists::list_methods).filter(|methods| methods.is_stream);
        let work = async {
            match (row, methods) {
                (Some(row), Some(methods)) => {
                    let budget = self.budget(socket);
                    self.dispatcher.list_stream(budget, row, methods, headers, body).await
                }
                (Some(row), None) if row.class != Class::Stream => {
                    self.unary(socket, row, &head.headers, headers, body).await.into_response()
                }
                (Some(_) | None, _) => {
                    let stream = OpenedStream { method: label(service, method), path, lane };
                    stream.pass(&self.dispatcher, &self.closing, headers, body).await
                }
            }
        };
        work.instrument(span).await
    }

    /// Refuses a call during which this version of the runtime may end. Callers have another source, as for a
    /// runtime without the method.
    async fn refuse_fatal(&self, row: &Policy) -> Option<Reply> {
        let (code, message) = match self.runtime.refusal(self.dispatcher.upstreams.runtime(), row).await {
            Ok(why) => (Code::Unimplemented, why?),
            Err(error) => (Code::Unavailable, error),
        };
        Some(Reply::local(code, message, Outcome::NotDispatched, Duration::ZERO))
    }
}

async fn wait_for_reply(mut answer: PendingReply) -> Reply {
    let reply = answer.wait_for(Option::is_some).await.ok().and_then(|reply| reply.as_deref().cloned());
    reply.unwrap_or_else(|| {
        Reply::local(
            Code::Internal,
            "the task of the call ended unexpectedly",
            Outcome::Unknown,
            Duration::ZERO,
        )
    })
}

/// Returns the label of a method in metrics: its name, if the table has it.
fn label(service: &str, method: &str) -> &'static str {
    let row = policy::TABLE.iter().find(|row| row.service == service && row.method == method);
    row.map_or(OTHER, |row| row.method)
}

/// Creates the span of a call. The layers of the socket continue the trace of the caller.
pub(crate) fn span(service: &str, method: &str, socket: Socket) -> Span {
    tracing::info_span!(
        "cri",
        otel.name = method,
        otel.status_code = field::Empty,
        error = field::Empty,
        rpc.service = service,
        socket = socket.name(),
        k8s.pod.uid = field::Empty,
        k8s.pod.name = field::Empty,
        k8s.namespace.name = field::Empty,
        k8s.container.name = field::Empty,
        container.id = field::Empty,
        queued_ms = field::Empty,
        outcome = field::Empty,
        joined = field::Empty,
    )
}
