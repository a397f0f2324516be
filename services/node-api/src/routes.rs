//! Routes requests to pages, after authentication and authorization.

use std::path::Path;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use node_api_access::User;
use node_api_access::authn::{AuthenticationError, Identity};
use node_api_access::authz::{AuthorizationError, required_permission};
use node_api_access::limits::{Client, Network, Pool};
use node_api_base::answer::{Answer, METRICS_TEXT, disabled, error, not_found, text, with_type};
use node_api_base::services::Services;
use node_api_base::uri::{decode_form, query, segments_after_first};
use node_api_streams::Action;
use quintlet_kit::contain::{Work, contained_request};
use quintlet_kit::failpoint;
use quintlet_telemetry::propagate;
use rustls::pki_types::CertificateDer;
use tracing::{Instrument as _, Span};

use crate::audit::{AccessDecision, PodAction};
use crate::counters::{CountedBody, InFlightRequest, ShareOf};
use crate::debug_flags::VERBOSITY_PATH;
use crate::server::{Handler, Peer};
use crate::state::ServerState;
use crate::{
    allocated_pods, checkpoint, container_logs, debug_flags, health, pods, profiling, system_logs, trace,
};

/// Handles the requests of one port.
#[derive(Debug, Clone)]
pub(crate) struct Routes {
    /// The state that all ports share.
    pub state: Arc<ServerState>,
    /// The port, which selects the pages.
    pub port: Port,
}

/// The ports that differ in pages and in access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Port {
    /// HTTPS: all pages, with authentication and authorization.
    Main,
    /// Plain HTTP without authentication: no pages that action on containers.
    ReadOnly,
    /// Plain HTTP: `/healthz` only.
    Healthz,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Healthz,
    Pods,
    Running,
    Allocated,
    Logs,
    Stream(Action),
    Run,
    Checkpoint,
    Stats,
    Metrics,
    Configz,
    Statusz,
    Flagz,
    SystemLogs,
    Debug,
}

/// Pages by the first segment of their path. The flag says whether the page requires
/// `enableDebuggingHandlers`.
const PAGES: &[(&str, Page, bool)] = &[
    ("healthz", Page::Healthz, false),
    ("pods", Page::Pods, false),
    ("runningpods", Page::Running, true),
    ("allocatedPods", Page::Allocated, true),
    ("containerLogs", Page::Logs, true),
    ("exec", Page::Stream(Action::Exec), true),
    ("attach", Page::Stream(Action::Attach), true),
    ("portForward", Page::Stream(Action::PortForward), true),
    ("run", Page::Run, true),
    ("checkpoint", Page::Checkpoint, true),
    ("stats", Page::Stats, false),
    ("metrics", Page::Metrics, false),
    ("configz", Page::Configz, true),
    ("statusz", Page::Statusz, true),
    ("flagz", Page::Flagz, true),
    ("logs", Page::SystemLogs, true),
    ("debug", Page::Debug, true),
];

/// Pages below `/metrics` that have their own label in metrics.
const METRICS: [&str; 3] = ["metrics/cadvisor", "metrics/probes", "metrics/resource"];

/// Returns the label of a path in metrics.
fn route(path: &str) -> &'static str {
    let mut parts = path.trim_start_matches('/').split('/');
    match (parts.next().unwrap_or_default(), parts.next()) {
        ("metrics", Some(below)) => {
            METRICS.into_iter().find(|name| name.split('/').nth(1) == Some(below)).unwrap_or("other")
        }
        (first, _) => PAGES.iter().find(|(name, ..)| *name == first).map_or("other", |(name, ..)| name),
    }
}

/// The response of a disabled page, on the read-only port or without `enableDebuggingHandlers`.
const DISABLED: &str = "Debug endpoints are disabled.";

impl Handler for Routes {
    fn certified(&self, chain: &[CertificateDer<'static>]) -> Option<Client> {
        self.state.authn.certified(chain)
    }

    async fn handle(&self, mut request: Request<Incoming>) -> Answer {
        if self.port == Port::Healthz {
            return self.answer(request).await;
        }
        let route = route(request.uri().path());
        let in_flight =
            Arc::new(self.state.counters.request(request.method(), route, self.port == Port::ReadOnly));
        // An upgraded connection holds it after the response.
        request.extensions_mut().insert(Arc::clone(&in_flight));
        let path = request.uri().path().to_owned();
        let answer = unless_panicked(&path, Box::pin(self.answer(request))).await;
        answer.map(|body| Body::new(CountedBody::new(body, in_flight)))
    }
}

impl Routes {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        match self.port {
            Port::Main => self.main(request).await,
            // These ports need no authentication.
            Port::ReadOnly | Port::Healthz => {
                if let Some(peer) = request.extensions().get::<Peer>()
                    && peer.life.trust(&Client::Anonymous(Network::from(peer.address.ip()))).is_err()
                {
                    peer.life.refuse();
                    return self.over_share(ShareOf::Connections, Pool::Others);
                }
                match (self.port, request.uri().path()) {
                    // Without a span: the client is unknown.
                    (Port::ReadOnly, _) => Box::pin(self.page(request, false)).await,
                    (_, "/healthz") => text(StatusCode::OK, "ok"),
                    _ => not_found(),
                }
            }
        }
    }

    async fn main(&self, mut request: Request<Incoming>) -> Answer {
        let peer = request.extensions().get::<Peer>().cloned();
        let pod_action = PodAction::from_path(request.uri().path());
        let (user, answer, verdict) = match self.admit(peer.as_ref(), &request).await {
            Ok(user) => {
                let span = span_of(&request);
                propagate::set_parent(&span, request.headers());
                // Pages with an audit line of their own.
                if request.uri().path() == VERBOSITY_PATH || profiling::is_for(request.uri().path()) {
                    request.extensions_mut().insert(user.clone());
                }
                let answer = self.traced(span, request).await;
                (user, answer, AccessDecision::Allowed)
            }
            Err((user, answer)) => {
                if let Some(peer) = &peer {
                    peer.life.refuse();
                }
                (user, answer, AccessDecision::Refused)
            }
        };
        if let Some(action) = pod_action {
            action.log(&user, peer.map(|p| p.address), answer.status(), verdict);
        }
        answer
    }

    /// Answers a request that is admitted, within its span.
    async fn traced(&self, span: Span, request: Request<Incoming>) -> Answer {
        if let Some(in_flight) = request.extensions().get::<Arc<InFlightRequest>>() {
            in_flight.trace(span.clone());
        }
        // Contained here as well, so that a panic is recorded in the audit log and in the span.
        let path = request.uri().path().to_owned();
        let page = Box::pin(self.page(request, self.state.debugging).instrument(span.clone()));
        let answer = unless_panicked(&path, page).await;
        trace::record_answer(&span, answer.status());
        answer
    }

    /// Authenticates and authorizes a request. Returns the user, or the response together with the user as
    /// far as it is known.
    async fn admit(&self, peer: Option<&Peer>, request: &Request<Incoming>) -> Result<User, (User, Answer)> {
        let state = &self.state;
        let chain = peer.map(|p| p.chain.clone()).unwrap_or_default();
        let client = peer.map_or(std::net::Ipv4Addr::UNSPECIFIED.into(), |p| p.address.ip());
        let path = request.uri().path();
        let identity = match state.authn.identity(&chain, request.headers(), client.into()).await {
            Ok(identity) => identity,
            Err(AuthenticationError::Invalid(why)) => {
                tracing::debug!(from = %client, path, why, "authentication failed");
                state.counters.refused(StatusCode::UNAUTHORIZED);
                return Err((User::default(), text(StatusCode::UNAUTHORIZED, "Unauthorized")));
            }
            Err(AuthenticationError::Busy) => {
                state.counters.refused_review();
                return Err((User::default(), busy("too many requests are waiting for a token review")));
            }
        };
        let required = required_permission(request.method(), path);
        let Identity { user, client } = identity;
        if let Err(refusal) = state.authz.check(&user, required, &state.node_name).await {
            let answer = refused(&user, required, &refusal);
            state.counters.refused(answer.status());
            return Err((user, answer));
        }
        match self.hold(&client, peer, request.extensions().get::<Arc<InFlightRequest>>()) {
            Ok(()) => Ok(user),
            Err(share) => Err((user, self.over_share(share, client.pool()))),
        }
    }

    /// Takes the slots that an authorized request needs: for the request itself, and for its connection if it
    /// is the first one.
    fn hold(
        &self,
        client: &Client,
        peer: Option<&Peer>,
        request: Option<&Arc<InFlightRequest>>,
    ) -> Result<(), ShareOf> {
        let share = self.state.limits.requests.of(client.pool());
        let slot = self.state.requests.of(client.pool()).enter(client.clone(), share);
        let slot = slot.map_err(|_| ShareOf::Requests)?;
        if let Some(peer) = peer {
            peer.life.trust(client).map_err(|_| ShareOf::Connections)?;
        }
        if let Some(request) = request {
            request.hold(slot);
        }
        Ok(())
    }

    fn over_share(&self, share: ShareOf, pool: Pool) -> Answer {
        self.state.counters.limited_request(share, pool);
        busy(match share {
            ShareOf::Connections => "too many connections of this user are open",
            ShareOf::Requests => "too many requests of this user are in flight",
        })
    }

    async fn page(&self, request: Request<Incoming>, debugging: bool) -> Answer {
        let path = request.uri().path().to_owned();
        let first = path.split('/').nth(1).unwrap_or_default();
        let found = PAGES.iter().find(|(name, ..)| *name == first);
        let Some((_, page, needs_debugging)) = found else { return not_found() };
        failpoint::work!("page answered");
        if *needs_debugging && !debugging {
            return match page {
                Page::Configz | Page::Statusz | Page::Flagz | Page::Checkpoint | Page::Allocated => {
                    not_found()
                }
                Page::Debug if path == VERBOSITY_PATH => not_found(),
                _ => disabled(DISABLED),
            };
        }
        let state = &self.state;
        let node = &state.services;
        let accept =
            request.headers().get(http::header::ACCEPT).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let accept = accept.as_deref();
        match page {
            Page::Healthz => health::healthz(node, &path, &query(&request)).await,
            Page::Pods => only(Method::GET, &request, || pods::pods(node)).await,
            Page::Running => only(Method::GET, &request, || pods::running(node)).await,
            Page::Allocated if state.allocated_pods => {
                let segments = segments_after_first(&path);
                only(Method::GET, &request, || allocated_pods::allocated(node, &segments)).await
            }
            Page::Logs => {
                only(Method::GET, &request, || {
                    let target = (segments_after_first(&path), query(&request));
                    async move {
                        let now = state.clock.wall();
                        let (segments, query) = &target;
                        container_logs::logs(node, &state.counters, segments, query, state.split_streams, now)
                            .await
                    }
                })
                .await
            }
            Page::Stream(action) => match *request.method() {
                Method::GET | Method::POST => self.stream(*action, request).await,
                _ => wrong_method(),
            },
            Page::Stats if path == "/stats/summary" => match *request.method() {
                Method::GET | Method::POST => self.summary(request).await,
                _ => wrong_method(),
            },
            Page::Metrics => only(Method::GET, &request, || self.metrics(&path)).await,
            Page::Configz if is_exact(&path) => {
                only(Method::GET, &request, || state.settings.configz(node)).await
            }
            Page::Statusz if is_exact(&path) => {
                let up = state.clock.boot().saturating_sub(state.started);
                state.settings.statusz(state.clock.wall(), up, accept)
            }
            Page::Flagz if is_exact(&path) => state.settings.flagz(accept),
            Page::SystemLogs => match &state.system_logs {
                // A query may be posted. Its parameters are those of the URL in any case.
                Some(root) => match *request.method() {
                    Method::POST if state.log_query.is_none() => wrong_method(),
                    Method::GET | Method::POST => self.system_log(root, &path, query(&request)).await,
                    _ => wrong_method(),
                },
                None => disabled("logs endpoint is disabled."),
            },
            Page::Debug if profiling::is_for(&path) && !state.profiling => {
                disabled("profiling endpoint is disabled.")
            }
            Page::Debug if profiling::is_for(&path) => {
                only(Method::GET, &request, || {
                    let (target, user) = (query(&request), request.extensions().get::<User>().cloned());
                    async move { profiling::page(&path, &target, user.as_ref()).await }
                })
                .await
            }
            Page::Debug if path == VERBOSITY_PATH => self.verbosity(request).await,
            Page::Checkpoint if state.checkpoints => {
                only(Method::POST, &request, || {
                    let target = (segments_after_first(&path), query(&request));
                    async move { checkpoint::checkpoint(node, &target.0, &target.1).await }
                })
                .await
            }
            Page::Stats
            | Page::Configz
            | Page::Statusz
            | Page::Flagz
            | Page::Debug
            | Page::Checkpoint
            | Page::Allocated => not_found(),
            Page::Run => {
                only(Method::POST, &request, || node_api_streams::run(&state.streams, &request)).await
            }
        }
    }

    async fn stream(&self, action: Action, request: Request<Incoming>) -> Answer {
        let peer = request.extensions().get::<Peer>().cloned();
        let in_flight = request.extensions().get::<Arc<InFlightRequest>>().cloned();
        // The connection remains in use after the response.
        let hold = || (peer.map(|p| p.life.request()), in_flight);
        node_api_streams::stream(&self.state.streams, action, request, hold).await
    }

    /// Returns the body of a request, or the response to one that is too large or too slow.
    async fn body(&self, request: Request<Incoming>) -> Result<Bytes, Answer> {
        let limits = self.state.limits;
        let body = Limited::new(request.into_body(), limits.body_bytes).collect();
        match tokio::time::timeout(limits.body, body).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(_)) => Err(error(StatusCode::PAYLOAD_TOO_LARGE, "http: request body too large")),
            Err(_) => Err(error(StatusCode::REQUEST_TIMEOUT, "timeout while reading the request body")),
        }
    }

    async fn verbosity(&self, mut request: Request<Incoming>) -> Answer {
        if !self.state.debug_flags {
            return disabled("flags endpoint is disabled.");
        }
        if *request.method() != Method::PUT {
            return debug_flags::unsupported_method();
        }
        let Some(user) = request.extensions_mut().remove::<User>() else { return not_found() };
        match self.body(request).await {
            Ok(body) => debug_flags::set_verbosity(&body, &user),
            Err(answer) => answer,
        }
    }

    async fn summary(&self, request: Request<Incoming>) -> Answer {
        let mut target = query(&request);
        if request.method() == Method::POST {
            match self.body(request).await {
                Ok(body) => target.extend(decode_form(&String::from_utf8_lossy(&body))),
                Err(answer) => return answer,
            }
        }
        let light = target.iter().any(|(k, v)| k == "only_cpu_and_memory" && v == "true");
        let pages = &self.state.pages;
        let page = if light { &pages.light_summary } else { &pages.summary };
        let state = Arc::clone(&self.state);
        page.get(|| async move { state.stats.summary(&state.services, light).await }).await
    }

    async fn system_log(&self, root: &Path, path: &str, target: Vec<(String, String)>) -> Answer {
        let queried = match &self.state.log_query {
            Some(log_query) => log_query.page(root, &target).await,
            None => None,
        };
        match queried {
            Some(answer) => answer,
            None => system_logs::page(root, path).await,
        }
    }

    async fn metrics(&self, path: &str) -> Answer {
        let ServerState { services: node, pages, metrics_cache, node_name, features, clock, started, .. } =
            &*self.state;
        let state = Arc::clone(&self.state);
        match path {
            "/metrics" => metrics_cache.page(node, node_name, features).await,
            "/metrics/resource" => {
                pages.resource.get(|| async move { state.stats.resource(&state.services).await }).await
            }
            "/metrics/cadvisor" => {
                pages.cadvisor.get(|| async move { state.stats.cadvisor(&state.services).await }).await
            }
            "/metrics/probes" => {
                let up = clock.boot().saturating_sub(*started);
                let up = jiff::SignedDuration::try_from(up).unwrap_or_default();
                metrics_cache.probes(node, clock.wall().checked_sub(up).unwrap_or_default()).await
            }
            "/metrics/slis" => slis(node).await,
            _ => not_found(),
        }
    }
}

/// Creates the span of a request.
fn span_of(request: &Request<Incoming>) -> Span {
    let path = request.uri().path();
    trace::request_span(request.method(), route(path), path)
}

/// Returns the pod that a path names. Its UID is unknown here.
fn pod_of(path: &str) -> Option<Work> {
    let first = path.split('/').nth(1)?;
    let parts = segments_after_first(path);
    let (Some(namespace), Some(name)) = (parts.first(), parts.get(1)) else { return None };
    trace::OF_PODS.contains(&first).then(|| Work::new("", format!("{namespace}/{name}")))
}

/// Returns the response, or 500 with the message of a panic.
async fn unless_panicked(path: &str, answer: impl Future<Output = Answer>) -> Answer {
    let answered = contained_request(pod_of(path), answer).await;
    answered.unwrap_or_else(|panic| error(StatusCode::INTERNAL_SERVER_ERROR, format!("node-api {panic}")))
}

/// Returns 429 with the time after which the client may try again.
fn busy(why: &'static str) -> Answer {
    let mut answer = text(StatusCode::TOO_MANY_REQUESTS, why);
    answer.headers_mut().insert(http::header::RETRY_AFTER, http::HeaderValue::from_static("1"));
    answer
}

fn refused(
    user: &User,
    required: node_api_access::authz::RequiredPermission,
    refusal: &AuthorizationError,
) -> Answer {
    match refusal {
        AuthorizationError::Denied => error(
            StatusCode::FORBIDDEN,
            format!(
                "Forbidden (user={}, verb={}, resource=nodes, subresource(s)=[{}])",
                user.name,
                required.verb,
                required.subresources.join(" ")
            ),
        ),
        AuthorizationError::Review { subresource, source } => {
            tracing::warn!(
                user = user.name,
                error = quintlet_kit::error_chain(source),
                "access review failed"
            );
            let message = format!(
                "Authorization error (user={}, verb={}, resource=nodes, subresource={subresource})",
                user.name, required.verb
            );
            text(StatusCode::INTERNAL_SERVER_ERROR, message)
        }
    }
}

async fn only<B, F: Future<Output = Answer>>(
    method: Method,
    request: &Request<B>,
    page: impl FnOnce() -> F,
) -> Answer {
    if *request.method() == method { page().await } else { wrong_method() }
}

/// Returns the health checks as service level indicators.
async fn slis(node: &Services) -> Answer {
    let mut out = String::from(
        "# HELP kubernetes_healthcheck This metric records the result of a single healthcheck.\n\
         # TYPE kubernetes_healthcheck gauge\n",
    );
    for name in health::CHECKS {
        let value = u8::from(health::check(node, name).await);
        out.push_str(&format!("kubernetes_healthcheck{{name=\"{name}\",type=\"healthz\"}} {value}\n"));
    }
    with_type(StatusCode::OK, METRICS_TEXT, out)
}

/// Returns whether the path has one segment.
fn is_exact(path: &str) -> bool {
    !path.trim_start_matches('/').contains('/')
}

fn wrong_method() -> Answer {
    error(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_is_parsed_from_the_path() {
        for (path, want) in [
            ("/containerLogs/default/web/main", Some("default/web")),
            ("/exec/kube-system/a/u1/main", Some("kube-system/a")),
            ("/portForward/default/web", Some("default/web")),
            ("/portForward/default", None),
            ("/metrics/resource/x", None),
            ("/", None),
        ] {
            assert_eq!(pod_of(path).as_ref().map(Work::name), want, "{path}");
        }
    }

    #[test]
    fn a_path_has_the_label_that_the_kubelet_gives_it() {
        for (path, want) in [
            ("/healthz/ping", "healthz"),
            ("/exec/default/web/main", "exec"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/metrics/slis", "other"),
            ("/metrics/", "other"),
            ("/stats/summary", "stats"),
            ("/wp-login.php", "other"),
            ("/", "other"),
        ] {
            assert_eq!(route(path), want, "{path}");
        }
    }
}
