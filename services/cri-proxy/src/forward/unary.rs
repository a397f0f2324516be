//! Unary calls. Mutations are fenced and joined with identical calls in flight.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use hyper::body::Incoming;
use parking_lot::Mutex;
use quintlet_kit::contain::{self, Work};
use quintlet_kit::task;
use quintlet_model::outcome::{JOIN_ONLY_HEADER, Outcome};
use tokio::sync::watch;
use tonic::Code;
use tracing::{Instrument as _, Span};

use super::request_body::read_body;
use super::{Call, EXEC_SYNC, Forwarder, wait_for_reply};
use crate::completed_execs::ExecRecord;
use crate::fence::FencingToken;
use crate::inflight::Admission;
use crate::policy::{Class, Policy, Socket};
use crate::reply::{self, Reply};
use crate::request_info::{self, RequestInfo};

impl Forwarder {
    pub(super) async fn unary(
        self: &Arc<Self>,
        socket: Socket,
        row: &'static Policy,
        given: &HeaderMap,
        mut headers: HeaderMap,
        body: Incoming,
    ) -> Reply {
        let refuse = |code, message: String| {
            self.metrics.done(row.method, Outcome::NotDispatched, None);
            Reply::local(code, message, Outcome::NotDispatched, Duration::ZERO)
        };
        let budget = self.budget(socket);
        let (body, held) = match read_body(body, &budget).await {
            Ok(whole) => whole,
            Err(bad) => return refuse(bad.code(), format!("{}: {bad}", row.method)),
        };
        headers.remove(http::header::CONTENT_LENGTH);
        let message = match reply::unframe(&body) {
            Ok(message) => message,
            Err(error) => return refuse(Code::InvalidArgument, format!("{}: {error}", row.method)),
        };
        if row.class == Class::Read {
            if !matches!(socket, Socket::Admin | Socket::Sync) {
                // Verbose replies contain the environment of a container, which may have values of Secrets.
                match request_info::is_verbose(row.method, &message) {
                    Ok(false) => {}
                    Ok(true) => {
                        self.metrics.denied(row.method, socket);
                        let why = "verbose is not allowed on the socket";
                        let message = format!("{}: {why} {}", row.method, socket.name());
                        return refuse(Code::PermissionDenied, message);
                    }
                    Err(error) => {
                        return refuse(Code::InvalidArgument, format!("{}: {error}", row.method));
                    }
                }
            }
            let info = RequestInfo::default();
            return self.run(&Call { policy: row, headers, body, info, budget, held }, None).await;
        }
        let info = match request_info::parse(row.service, row.method, &message) {
            Ok(info) => info,
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                let source = error.source().map(ToString::to_string).unwrap_or_default();
                return refuse(Code::InvalidArgument, format!("{error}: {source}"));
            }
        };
        if let Some(uid) = &info.pod_uid {
            Span::current().record("pod.uid", uid.as_str());
        }
        // Callers name the pod in metadata, since many requests name only a container.
        let work = contain::current().or_else(|| info.pod_uid.as_ref().map(|uid| Work::new(uid, "")));
        let token = match FencingToken::read(given, socket == Socket::Sync)
            .and_then(|token| self.fence.check(token, self.clock.boot()).map(|()| token))
        {
            Ok(token) => token,
            Err(error) => return self.fenced(row.method, error, Duration::ZERO),
        };
        let mut call = Call { policy: row, headers, body, info, budget, held };
        // Only calls of pod-sync are joined. Administrators may repeat a call on purpose.
        let key = call.info.key.take().filter(|_| socket == Socket::Sync);
        if let Some(began) = given.get(JOIN_ONLY_HEADER) {
            let began =
                began.to_str().ok().and_then(|v| v.parse().ok()).map_or(Duration::ZERO, Duration::from_nanos);
            let joined = key.as_ref().and_then(|key| self.in_flight.join(key, &call.body, token));
            if let Some(answer) = joined {
                self.metrics.joined.inc();
                Span::current().record("joined", true);
                return wait_for_reply(answer).await;
            }
            match key.as_ref().map_or(ExecRecord::Unknown, |key| self.completed_execs.find(key, began)) {
                ExecRecord::NotReceived => {}
                ExecRecord::Completed(reply) => return *reply,
                ExecRecord::Unknown => {
                    return refuse(Code::NotFound, format!("no such {} is in flight", row.method));
                }
            }
        }
        let answer = match key {
            Some(key) => match self.in_flight.enter(key.clone(), &call.body, token) {
                Admission::Lead(lead) => {
                    let answer = lead.subscribe();
                    let this = self.clone();
                    let (entered, kept) = (self.clock.boot(), (row.method == EXEC_SYNC).then_some(key));
                    let work = async move {
                        let token = lead.token();
                        let reply = this.run_contained(work, &call, &token).await;
                        // The result is stored before the call leaves `in_flight`, so that it is always found.
                        if let Some(key) = kept {
                            this.completed_execs.record(key, entered, &reply);
                        }
                        lead.finish(reply);
                    };
                    drop(task::spawn("mutation", work.instrument(Span::current())));
                    answer
                }
                Admission::Join(answer) => {
                    self.metrics.joined.inc();
                    Span::current().record("joined", true);
                    answer
                }
                Admission::Conflict => {
                    self.metrics.conflicts.inc();
                    let message = format!("another {} for the same object is in flight", row.method);
                    return refuse(Code::Aborted, message);
                }
            },
            None => {
                let (sender, answer) = watch::channel(None);
                let this = self.clone();
                let work = async move {
                    let reply = this.run_contained(work, &call, &Arc::new(Mutex::new(token))).await;
                    sender.send_replace(Some(Arc::new(reply)));
                };
                drop(task::spawn("mutation", work.instrument(Span::current())));
                answer
            }
        };
        wait_for_reply(answer).await
    }
}
