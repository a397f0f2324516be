//! Unary calls. Mutations are fenced and joined with identical calls in flight.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use hyper::body::Incoming;
use parking_lot::Mutex;
use quintlet_kit::contain::{self, Work};
use quintlet_kit::task;
use quintlet_model::outcome::{JOIN_ONLY_HEADER, Outcome};
use quintlet_model::text::HOOK_OUTPUT;
use tokio::sync::watch;
use tonic::Code;
use tracing::{Instrument as _, Span};

use super::request_body::read_body;
use super::{Call, EXEC_SYNC, Forwarder, wait_for_reply};
use crate::completed_execs::ExecRecord;
use crate::fence::FencingToken;
use crate::inflight::{Admission, PendingReply};
use crate::policy::{Class, Policy, Socket};
use crate::reply::{self, Reply};
use crate::request_info::{self, CallKey, RequestInfo};

/// A call that cri-proxy answers itself, with this code and message.
struct Refusal {
    code: Code,
    message: String,
}

impl Forwarder {
    pub(super) async fn unary(
        self: &Arc<Self>,
        socket: Socket,
        row: &'static Policy,
        given: &HeaderMap,
        mut headers: HeaderMap,
        body: Incoming,
    ) -> Reply {
        let invalid = |error: &dyn std::fmt::Display| Refusal {
            code: Code::InvalidArgument,
            message: format!("{}: {error}", row.method),
        };
        let budget = self.budget(socket);
        let (body, held) = match read_body(body, &budget).await {
            Ok(whole) => whole,
            Err(bad) => {
                let message = format!("{}: {bad}", row.method);
                return self.refused(row.method, Refusal { code: bad.code(), message });
            }
        };
        headers.remove(http::header::CONTENT_LENGTH);
        let message = match reply::unframe(&body) {
            Ok(message) => message,
            Err(error) => return self.refused(row.method, invalid(&error)),
        };
        // The commands of pod-sync are hooks, of which it reads the beginning of the output.
        let is_hook = socket == Socket::Sync && row.method == EXEC_SYNC;
        let short_output = is_hook.then_some(HOOK_OUTPUT);
        let call =
            Call { policy: row, headers, body, info: RequestInfo::default(), budget, held, short_output };
        if row.class != Class::Read {
            return self.mutation(socket, given, call, &message).await;
        }
        match self.check_verbose(socket, row.method, &message) {
            Ok(()) => self.run(&call).await,
            Err(refusal) => self.refused(row.method, refusal),
        }
    }

    fn refused(&self, method: &'static str, refusal: Refusal) -> Reply {
        self.dispatcher.metrics.done(method, Outcome::NotDispatched, None);
        Reply::local(refusal.code, refusal.message, Outcome::NotDispatched, Duration::ZERO)
    }

    // Verbose replies contain the environment of a container, which may have values of Secrets.
    fn check_verbose(&self, socket: Socket, method: &'static str, message: &Bytes) -> Result<(), Refusal> {
        if matches!(socket, Socket::Admin | Socket::Sync) {
            return Ok(());
        }
        match request_info::is_verbose(method, message) {
            Ok(false) => Ok(()),
            Ok(true) => {
                self.dispatcher.metrics.denied(method, socket);
                let message = format!("{method}: verbose is not allowed on the socket {}", socket.name());
                Err(Refusal { code: Code::PermissionDenied, message })
            }
            Err(error) => Err(Refusal { code: Code::InvalidArgument, message: format!("{method}: {error}") }),
        }
    }

    async fn mutation(
        self: &Arc<Self>,
        socket: Socket,
        given: &HeaderMap,
        mut call: Call,
        message: &Bytes,
    ) -> Reply {
        let row = call.policy;
        call.info = match request_info::parse(row.service, row.method, message) {
            Ok(info) => info,
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                let source = error.source().map(ToString::to_string).unwrap_or_default();
                let message = format!("{error}: {source}");
                return self.refused(row.method, Refusal { code: Code::InvalidArgument, message });
            }
        };
        for (attribute, value) in call.info.attributes() {
            Span::current().record(attribute, value);
        }
        let token = match FencingToken::read(given, socket == Socket::Sync).and_then(|token| {
            self.dispatcher.fence.check(token, self.dispatcher.clock.boot()).map(|()| token)
        }) {
            Ok(token) => token,
            Err(error) => return self.dispatcher.fenced(row.method, error, Duration::ZERO),
        };
        // Only calls of pod-sync are joined. Administrators may repeat a call on purpose.
        let key = call.info.key.take().filter(|_| socket == Socket::Sync);
        let answer = match given.get(JOIN_ONLY_HEADER) {
            Some(began) => self.join_only(&call, key.as_ref(), began, token),
            None => Ok(None),
        };
        let answer = match answer {
            Ok(Some(EarlierCall::InFlight(answer))) => Ok(answer),
            Ok(Some(EarlierCall::Completed(reply))) => return *reply,
            Ok(None) => self.join_or_start(call, key, token),
            Err(refusal) => Err(refusal),
        };
        match answer {
            Ok(answer) => wait_for_reply(answer).await,
            Err(refusal) => self.refused(row.method, refusal),
        }
    }

    /// Returns the earlier call that this call repeats, or `None` if the earlier call was not received.
    /// `began` is the time (CLOCK_BOOTTIME, nanoseconds) of the earlier call.
    fn join_only(
        &self,
        call: &Call,
        key: Option<&CallKey>,
        began: &HeaderValue,
        token: FencingToken,
    ) -> Result<Option<EarlierCall>, Refusal> {
        let began =
            began.to_str().ok().and_then(|v| v.parse().ok()).map_or(Duration::ZERO, Duration::from_nanos);
        if let Some(answer) = key.and_then(|key| self.in_flight.join(key, &call.body, token)) {
            self.record_join();
            return Ok(Some(EarlierCall::InFlight(answer)));
        }
        match key.map_or(ExecRecord::Unknown, |key| self.completed_execs.find(key, began)) {
            ExecRecord::NotReceived => Ok(None),
            ExecRecord::Completed(reply) => Ok(Some(EarlierCall::Completed(reply))),
            ExecRecord::Unknown => {
                let message = format!("no such {} is in flight", call.policy.method);
                Err(Refusal { code: Code::NotFound, message })
            }
        }
    }

    fn record_join(&self) {
        self.dispatcher.metrics.joined.inc();
        Span::current().record("joined", true);
    }

    /// Joins the identical call in flight, or starts this call. A call without a key is always started.
    fn join_or_start(
        self: &Arc<Self>,
        call: Call,
        key: Option<CallKey>,
        token: FencingToken,
    ) -> Result<PendingReply, Refusal> {
        // Callers name the pod in metadata, since many requests name only a container.
        let work = contain::current().or_else(|| call.info.pod_uid.as_ref().map(|uid| Work::new(uid, "")));
        let (this, method) = (self.clone(), call.policy.method);
        let Some(key) = key else {
            let (sender, answer) = watch::channel(None);
            let work = async move {
                let reply = this.dispatcher.run_contained(work, &call, &Arc::new(Mutex::new(token))).await;
                sender.send_replace(Some(Arc::new(reply)));
            };
            drop(task::spawn("mutation", work.instrument(Span::current())));
            return Ok(answer);
        };
        match self.in_flight.enter(key.clone(), &call.body, token) {
            Admission::Lead(lead) => {
                let answer = lead.subscribe();
                let (entered, kept) = (self.dispatcher.clock.boot(), (method == EXEC_SYNC).then_some(key));
                let work = async move {
                    let token = lead.token();
                    let reply = this.dispatcher.run_contained(work, &call, &token).await;
                    // The result is stored before the call leaves `in_flight`, so that it is always found.
                    if let Some(key) = kept {
                        this.completed_execs.record(key, entered, &reply);
                    }
                    lead.finish(reply);
                };
                drop(task::spawn("mutation", work.instrument(Span::current())));
                Ok(answer)
            }
            Admission::Join(answer) => {
                self.record_join();
                Ok(answer)
            }
            Admission::Conflict => {
                self.dispatcher.metrics.conflicts.inc();
                let message = format!("another {method} for the same object is in flight");
                Err(Refusal { code: Code::Aborted, message })
            }
        }
    }
}

/// An earlier call that a caller repeats to get its reply.
enum EarlierCall {
    InFlight(PendingReply),
    Completed(Box<Reply>),
}
