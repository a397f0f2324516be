//! `quintctl health`: the health of all services and of their dependencies.

use std::fmt::Write as _;
use std::time::Duration;

use quintctl_text::{clean, or_nothing, table};
use quintlet_cri_api::v1::VersionRequest;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::notify::Liveness;
use quintlet_kit::server::{HTTPS_LOOP, NODE, OFFLINE_CACHE, RELIST_LOOP, SYNC_LOOP};
use quintlet_proto::debug::v1::BuildRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::{HealthReply, HealthRequest};
use quintlet_proto::runtime::v1::proxy_info_client::ProxyInfoClient;
use quintlet_proto::runtime::v1::{HintSource, ProxyInfoReply, ProxyInfoRequest};
use serde::Serialize;
use tonic::{Code, Response};
use tonic_health::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

/// Time limit of the runtime's Version call, which does no work.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(2);

const CRI_PROXY: &str = "cri-proxy";

/// The health of one service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    pub(crate) service: String,
    /// The service and the dependencies that its health includes are well.
    pub(crate) serving: bool,
    /// One word or two for the table: `serving`, `unhealthy`, `not serving`, `unknown`, `unreachable`, `live`
    /// or `stalled`.
    pub(crate) health: String,
    pub(crate) detail: String,
}

/// Time limit of a check of [`HealthArgs::live`], for each socket.
const LIVE: Duration = Duration::from_secs(10);

/// Check the health of all services, or of one.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct HealthArgs {
    /// Check only this service, as its container's probes do
    #[arg(value_name = "SERVICE")]
    pub(crate) service: Option<ServiceArg>,
    /// Check liveness only: fail if the service's socket does not answer or its main loop is stuck. An
    /// unreachable runtime or API server is not a failure
    #[arg(long, requires = "service")]
    pub(crate) live: bool,
}

/// A service on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ServiceArg {
    /// cri-proxy
    CriProxy,
    /// pleg-service
    PlegService,
    /// All instances of probe-service whose sockets are visible here
    ProbeService,
    /// status-reporter
    StatusReporter,
    /// pod-sync
    PodSync,
    /// The node API
    NodeApi,
}

impl ServiceArg {
    /// Returns the instances of the service.
    pub(crate) fn peers(self, paths: &Paths) -> Vec<Peer> {
        match self {
            Self::CriProxy => vec![Peer::cri_proxy(paths)],
            Self::PlegService => vec![Peer::pleg(paths)],
            Self::ProbeService => {
                let found = Peer::probes(paths);
                if found.is_empty() { vec![Peer::new("probe-service", paths.probe("*"))] } else { found }
            }
            Self::StatusReporter => vec![Peer::status_reporter(paths)],
            Self::PodSync => vec![Peer::pod_sync(paths)],
            Self::NodeApi => vec![Peer::node_api(paths)],
        }
    }
}

/// Prints the health, and returns whether all services are healthy. For a service that is named, one healthy
/// instance is enough, since the socket of a renamed instance may be left behind.
///
/// # Errors
/// Standard output is closed.
pub(crate) async fn run(args: &HealthArgs, paths: &Paths, format: Format) -> Result<bool, Error> {
    let Some(named) = args.service else {
        let rows = fetch(paths).await;
        let healthy = rows.iter().all(|r| r.serving);
        print(format.render(&rows, |_| render(&rows))?)?;
        return Ok(healthy);
    };
    let peers = named.peers(paths);
    let rows = match args.live {
        true => futures::future::join_all(peers.iter().map(|peer| live(named, peer))).await,
        false => futures::future::join_all(peers.iter().map(|peer| row(peer, paths))).await,
    };
    let healthy = rows.iter().any(|r| r.serving);
    print(format.render(&rows, |_| render(&rows))?)?;
    Ok(healthy)
}

/// Makes the liveness check that the services' systemd watchdog also uses.
async fn live(named: ServiceArg, peer: &Peer) -> Row {
    let socket = Liveness::of([peer.path.clone()]);
    let liveness = match named {
        ServiceArg::PodSync => socket.and_loop(SYNC_LOOP),
        ServiceArg::PlegService => socket.and_loop_if_any(RELIST_LOOP),
        ServiceArg::NodeApi => socket.and_loop_if_any(HTTPS_LOOP),
        ServiceArg::CriProxy | ServiceArg::ProbeService | ServiceArg::StatusReporter => socket,
    };
    let checked = liveness.check(LIVE).await;
    Row {
        service: peer.service.clone(),
        serving: checked.is_ok(),
        health: if checked.is_ok() { "live" } else { "stalled" }.to_owned(),
        detail: checked.err().map(|error| error.to_string()).unwrap_or_default(),
    }
}

/// Returns a row for each service.
pub(crate) async fn fetch(paths: &Paths) -> Vec<Row> {
    overview(paths).await.rows
}

/// The health of all services at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Overview {
    /// One row per service.
    pub(crate) rows: Vec<Row>,
    /// Cri-proxy's view of the runtime.
    pub(crate) runtime: Option<ProxyInfoReply>,
    pub(crate) pleg: Option<HealthReply>,
    /// Error of the runtime although cri-proxy is connected to it.
    pub(crate) runtime_error: Option<String>,
}

/// Checks all services and, through cri-proxy, the runtime.
pub(crate) async fn overview(paths: &Paths) -> Overview {
    let peers = Peer::all(paths);
    let (runtime, pleg) = (Peer::cri_proxy(paths), Peer::pleg(paths));
    let (rows, runtime, pleg, runtime_error) = tokio::join!(
        futures::future::join_all(peers.iter().map(|peer| row(peer, paths))),
        proxy(&runtime),
        self::pleg(&pleg),
        ask_runtime(&runtime),
    );
    let (runtime, pleg) = (runtime.ok(), pleg.ok());
    let mut overview = Overview { rows, runtime, pleg, runtime_error: None };
    // Cri-proxy itself reports a runtime that it is not connected to.
    if overview.runtime.as_ref().is_some_and(|r| r.connected)
        && let Err(why) = runtime_error
    {
        if let Some(row) = overview.rows.iter_mut().find(|r| r.service == CRI_PROXY && r.serving) {
            (row.serving, row.health) = (false, "unhealthy".to_owned());
            row.detail = format!("the runtime {why}; {}", row.detail);
        }
        overview.runtime_error = Some(why);
    }
    overview
}

/// Checks that the runtime answers a Version call, the cheapest of the CRI.
async fn ask_runtime(peer: &Peer) -> Result<(), String> {
    let Ok(channel) = peer.channel().await else { return Ok(()) };
    let mut client = RuntimeServiceClient::new(channel);
    let call = client.version(VersionRequest { version: "v1".to_owned() });
    match tokio::time::timeout(RUNTIME_TIMEOUT, call).await {
        Err(_) => Err(format!("does not answer within {}s", RUNTIME_TIMEOUT.as_secs())),
        // An error is a response too; cri-proxy sends no call to a runtime that it is not connected to.
        Ok(_) => Ok(()),
    }
}

async fn row(peer: &Peer, paths: &Paths) -> Row {
    let status = match check(peer, "").await {
        Ok(status) => status,
        Err(error) => {
            return Row {
                service: peer.service.clone(),
                serving: false,
                health: "unreachable".to_owned(),
                detail: quintlet_kit::error_chain(&error),
            };
        }
    };
    let refused = refused_peers(peer).await;
    let own = if let Some(refused) = refused {
        Ok((false, refused))
    } else if *peer == Peer::pleg(paths) {
        pleg(peer).await.map(|r| pleg_health(&r))
    } else if *peer == Peer::cri_proxy(paths) {
        proxy(peer).await.map(|r| proxy_health(&r))
    } else if *peer == Peer::status_reporter(paths) {
        check(peer, NODE).await.map(node_health)
    } else if *peer == Peer::pod_sync(paths) {
        check(peer, OFFLINE_CACHE).await.map(offline_health)
    } else {
        Ok((true, String::new()))
    };
    let (well, detail) = own.unwrap_or_else(|error| without_detail(&error));
    let serving = status == ServingStatus::Serving;
    let health = match (status, well) {
        (ServingStatus::Serving, true) => "serving",
        (ServingStatus::Serving, false) => "unhealthy",
        (ServingStatus::NotServing, _) => "not serving",
        (ServingStatus::Unknown, _) => "unknown",
    };
    Row { service: peer.service.clone(), serving: serving && well, health: health.to_owned(), detail }
}

/// Returns whether a service is well that gave no details, and why not. Users of other services, as in their
/// containers, get none.
fn without_detail(error: &Error) -> (bool, String) {
    match error {
        Error::Rpc { code: Code::PermissionDenied, .. } => (true, "no details for this user".to_owned()),
        other => (false, quintlet_kit::error_chain(other)),
    }
}

/// Returns the peers that the service refuses, with what to do, or none.
async fn refused_peers(peer: &Peer) -> Option<String> {
    let mut client = DebugClient::new(peer.channel().await.ok()?);
    let reply = peer.call(client.build(BuildRequest {})).await.ok()?;
    let reasons: Vec<String> = reply.refused_peers.iter().map(|refused| clean(&refused.reason)).collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// Returns the status of `name` in the service's health, where the empty name is the service as a whole. An
/// unknown name has the status unknown.
async fn check(peer: &Peer, name: &str) -> Result<ServingStatus, Error> {
    let mut client = HealthClient::new(peer.channel().await?);
    let call = async {
        match client.check(HealthCheckRequest { service: name.to_owned() }).await {
            Err(status) if status.code() == Code::NotFound => {
                Ok(Response::new(HealthCheckResponse::default()))
            }
            answer => answer,
        }
    };
    let reply = peer.call(call).await?;
    use tonic_health::pb::health_check_response::ServingStatus as Wire;
    Ok(match reply.status() {
        Wire::Serving => ServingStatus::Serving,
        Wire::NotServing => ServingStatus::NotServing,
        Wire::Unknown | Wire::ServiceUnknown => ServingStatus::Unknown,
    })
}

async fn pleg(peer: &Peer) -> Result<HealthReply, Error> {
    let mut client = PlegClient::new(peer.channel().await?);
    peer.call(client.health(HealthRequest {})).await
}

async fn proxy(peer: &Peer) -> Result<ProxyInfoReply, Error> {
    let mut client = ProxyInfoClient::new(peer.channel().await?);
    peer.call(client.get(ProxyInfoRequest {})).await
}

/// Returns whether status-reporter can update the Node, and the detail. A node without an API server has no
/// Node.
#[must_use]
fn node_health(status: ServingStatus) -> (bool, String) {
    match status {
        ServingStatus::NotServing => {
            (false, "the API server rejects the Node; the reason is in status-reporter's log".to_owned())
        }
        ServingStatus::Serving => (true, "the API server accepts the Node".to_owned()),
        ServingStatus::Unknown => (true, String::new()),
    }
}

/// Returns that pod-sync is well, and the detail if pods run that the API server has not confirmed.
#[must_use]
fn offline_health(status: ServingStatus) -> (bool, String) {
    match status {
        ServingStatus::NotServing => {
            (true, "pods run from the offline cache, no answer of the API server since the start".to_owned())
        }
        ServingStatus::Serving | ServingStatus::Unknown => (true, String::new()),
    }
}

/// Returns whether PLEG is healthy, and the detail.
#[must_use]
pub(crate) fn pleg_health(reply: &HealthReply) -> (bool, String) {
    if !reply.healthy {
        return (false, clean(&reply.message));
    }
    let last = reply
        .last_list_age_seconds
        .map_or_else(|| "no list yet".to_owned(), |s| format!("last list {s:.1}s ago"));
    let live = if reply.hints_live { "live" } else { "not live" };
    let detail = format!(
        "{} pods, {last}, relist every {}s, hints {} {live}, epoch {}",
        reply.pods,
        reply.relist_period_seconds,
        or_nothing(&reply.hint_source),
        reply.epoch
    );
    // Most inspections take milliseconds.
    let slow = reply.oldest_inspection_seconds.filter(|s| *s >= 1.0);
    (true, slow.map_or(detail.clone(), |s| format!("{detail}, an inspection in progress for {s:.0}s")))
}

/// Returns whether cri-proxy is connected to its runtime, and the detail.
#[must_use]
pub(crate) fn proxy_health(reply: &ProxyInfoReply) -> (bool, String) {
    let endpoint = clean(&reply.endpoint);
    if !reply.connected {
        return (false, format!("no runtime at {endpoint}: {}", or_nothing(&reply.error)));
    }
    let mut detail =
        format!("{} {} at {endpoint}", clean(&reply.runtime_name), clean(&reply.runtime_version));
    if let Some(source) = &reply.source {
        let name = match source.source() {
            HintSource::Containerd => "containerd",
            HintSource::Cri => "cri",
            HintSource::None | HintSource::Unspecified => "none",
        };
        // Writing to a String does not fail.
        let _ = write!(detail, ", events {name}{}", if source.live { "" } else { " (not live)" });
    }
    (true, detail)
}

#[must_use]
pub(crate) fn render(rows: &[Row]) -> String {
    let cells: Vec<Vec<String>> =
        rows.iter().map(|r| vec![clean(&r.service), r.health.clone(), clean(&r.detail)]).collect();
    table(&["SERVICE", "HEALTH", "DETAIL"], &cells)
}

#[cfg(test)]
mod tests {
    use quintlet_proto::runtime::v1::SourceState;

    use super::*;

    #[test]
    fn a_service_that_gives_this_user_no_details_is_not_unhealthy() {
        let refusal = |code| Error::Rpc { service: "pleg-service".into(), code, message: "no".into() };
        assert_eq!(
            without_detail(&refusal(Code::PermissionDenied)),
            (true, "no details for this user".to_owned())
        );
        assert!(!without_detail(&refusal(Code::Internal)).0);
    }

    #[test]
    fn pleg_service_is_healthy_while_its_lists_succeed() {
        let well = HealthReply {
            healthy: true,
            last_list_age_seconds: Some(0.34),
            hint_source: "containerd".into(),
            hints_live: true,
            relist_period_seconds: 30.0,
            epoch: 7,
            pods: 3,
            ..HealthReply::default()
        };
        let want = "3 pods, last list 0.3s ago, relist every 30s, hints containerd live, epoch 7";
        assert_eq!(pleg_health(&well), (true, want.to_owned()));
        let slow = HealthReply { oldest_inspection_seconds: Some(11.6), ..well };
        assert_eq!(pleg_health(&slow), (true, format!("{want}, an inspection in progress for 12s")));
        let ill =
            HealthReply { message: "pleg was last seen active 3m5s ago".into(), ..HealthReply::default() };
        assert_eq!(pleg_health(&ill), (false, "pleg was last seen active 3m5s ago".to_owned()));
    }

    #[test]
    fn cri_proxy_is_healthy_with_a_runtime() {
        let mut reply = ProxyInfoReply {
            connected: true,
            runtime_name: "containerd".into(),
            runtime_version: "1.6.20".into(),
            endpoint: "unix:///c.sock".into(),
            source: Some(SourceState {
                source: HintSource::Containerd.into(),
                live: false,
                detail: String::new(),
            }),
            ..ProxyInfoReply::default()
        };
        let want = "containerd 1.6.20 at unix:///c.sock, events containerd (not live)";
        assert_eq!(proxy_health(&reply), (true, want.to_owned()));
        reply.connected = false;
        reply.error = "connection refused".into();
        assert_eq!(
            proxy_health(&reply),
            (false, "no runtime at unix:///c.sock: connection refused".to_owned())
        );
    }
}
