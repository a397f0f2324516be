//! The header of the live table: the paths of this node and the health of the services.
//!
//! A task checks the health of all services every second, and more often while a service is not ok. A running
//! process that does not answer is not ok.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quintctl_text::clean;
use quintlet_kit::args::paths::Paths;
use tokio::sync::watch;

use super::args::UpArgs;
use super::names;
use super::plan::Layout;
use super::service::ServiceState;
use crate::health::{self, Overview};

/// Interval of health checks.
const PERIOD: Duration = Duration::from_secs(1);

/// Interval of health checks while a service is not ok, so that its recovery is shown at once.
const RECOVERY_PERIOD: Duration = Duration::from_millis(200);

/// Age below which a process that does not answer is starting. A start takes milliseconds, on a busy machine
/// seconds.
const STARTUP_TIME: Duration = Duration::from_secs(3);

/// The parts of the header that do not change while the services run.
#[derive(Debug, Clone)]
pub(super) struct Header {
    title: String,
    private: bool,
    endpoint: String,
    run_dir: String,
    log_dir: String,
}

impl Header {
    pub(super) fn new(args: &UpArgs, layout: &Layout, endpoint: &str, node: &str, cwd: &Path) -> Self {
        let short = |path: &PathBuf| path.strip_prefix(cwd).unwrap_or(path).display().to_string();
        let mode = match &args.kubeconfig {
            Some(file) => format!("node \"{node}\"  (API server of {})", file.display()),
            None => format!(
                "standalone on host \"{node}\"  (no API server; manifests from {})",
                short(&layout.manifests)
            ),
        };
        let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
        Self {
            title: format!("quintlet {}  {mode}", env!("CARGO_PKG_VERSION")),
            private: args.private_containerd,
            endpoint: short(&PathBuf::from(path)),
            run_dir: short(&layout.run_dir),
            log_dir: short(&layout.log_dir),
        }
    }

    /// Returns the header without the state of the services.
    pub(super) fn lines(&self) -> Vec<String> {
        vec![self.title.clone(), self.runtime(None), self.places()]
    }

    /// Returns the line of the runtime; its name, version and events once they are known.
    fn runtime(&self, overview: Option<&Overview>) -> String {
        let runtime = overview.and_then(|l| l.runtime.as_ref()).filter(|r| !r.runtime_name.is_empty());
        let name = runtime.map_or_else(String::new, |r| {
            // Distributions append a suffix: 1.6.20~ds1.
            let version = r.runtime_version.split(['~', '+']).next().unwrap_or_default();
            format!("{} {}  ", clean(&r.runtime_name), clean(version))
        });
        let private = if self.private { "private, " } else { "" };
        let mut line = format!("  runtime   {name}{private}{}", self.endpoint);
        if let Some(pleg) = overview.and_then(|l| l.pleg.as_ref()) {
            let source = if pleg.hints_live { clean(&pleg.hint_source) } else { "none".to_owned() };
            line.push_str(&format!("   events: {source}   relist every {}s", pleg.relist_period_seconds));
        }
        if let Some(error) = overview.and_then(|l| l.runtime_error.as_ref()) {
            line.push_str(&format!("   ! {}", clean(error)));
        }
        line
    }

    fn places(&self) -> String {
        format!("  sockets   {}   logs {}", self.run_dir, self.log_dir)
    }

    /// Returns the header for a width in characters. The last line has the state of the services.
    pub(super) fn all(
        &self,
        overview: Option<&Overview>,
        states: &[(&'static str, ServiceState)],
        width: usize,
    ) -> Vec<String> {
        vec![self.title.clone(), self.runtime(overview), self.places(), services(overview, states, width)]
    }
}

/// Returns the state of one service, such as `ok (1 restart)`.
fn service_state(
    name: &str,
    state: &ServiceState,
    overview: Option<&Overview>,
    processes: &[&str],
) -> String {
    let (restarts, starting) = match state {
        ServiceState::New => return "starting".to_owned(),
        ServiceState::Waiting { exit, .. } => return format!("exited ({exit})"),
        ServiceState::Ended => return "stopped".to_owned(),
        ServiceState::Running { starts, since, .. } => (starts - 1, since.elapsed() < STARTUP_TIME),
    };
    let rows: Vec<&health::Row> = overview
        .iter()
        .flat_map(|l| &l.rows)
        .filter(|row| names::is_row_of(name, &row.service, processes))
        .collect();
    let mut word = match rows.iter().find(|r| !r.serving) {
        Some(_) if starting => "starting".to_owned(),
        Some(row) => row.health.clone(),
        None if rows.is_empty() => "starting".to_owned(),
        None if name == names::PROBER && rows.len() > 1 => format!("ok x{}", rows.len()),
        None => "ok".to_owned(),
    };
    match restarts {
        0 => {}
        1 => word.push_str(" (1 restart)"),
        n => word.push_str(&format!(" ({n} restarts)")),
    }
    word
}

/// Returns the line of all services, or if that exceeds `width`, of those that are not ok.
fn services(overview: Option<&Overview>, states: &[(&'static str, ServiceState)], width: usize) -> String {
    let processes: Vec<&str> = states.iter().map(|(name, _)| *name).collect();
    let words: Vec<(&str, String)> = states
        .iter()
        .map(|(name, state)| (*name, service_state(name, state, overview, &processes)))
        .collect();
    let list = |words: &[&(&str, String)]| {
        words.iter().map(|(name, word)| format!("{name} {word}")).collect::<Vec<_>>().join("   ")
    };
    let full = format!("  {}", list(&words.iter().collect::<Vec<_>>()));
    if full.chars().count() <= width {
        return full;
    }
    let failing: Vec<_> = words.iter().filter(|(_, word)| !word.starts_with("ok")).collect();
    let ok = words.len() - failing.len();
    if failing.is_empty() {
        return format!("  {ok} services ok");
    }
    format!("  {ok} of {} ok   {}", words.len(), list(&failing))
}

/// Checks the health of all services until the receivers are dropped.
pub(super) async fn poll_health(paths: Paths, overviews: watch::Sender<Option<Overview>>) {
    while !overviews.is_closed() {
        let overview = health::overview(&paths).await;
        let pause = if overview.rows.iter().all(|r| r.serving) { PERIOD } else { RECOVERY_PERIOD };
        overviews.send_replace(Some(overview));
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use quintlet_proto::pleg::v1::HealthReply;
    use quintlet_proto::runtime::v1::ProxyInfoReply;

    use tokio::time::Instant;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        up: UpArgs,
    }

    fn header() -> Header {
        let args = Cli::try_parse_from(["up", "--private-containerd", "--manifests", "examples"]).unwrap().up;
        let layout = Layout::resolve(&args, Path::new("/w"));
        Header::new(&args, &layout, "unix:///w/.run/containerd/containerd.sock", "vm", Path::new("/w"))
    }

    fn row(service: &str, health: &str) -> health::Row {
        health::Row {
            service: service.into(),
            serving: health == "serving",
            health: health.into(),
            detail: String::new(),
        }
    }

    fn running(starts: u32) -> ServiceState {
        ServiceState::Running { pid: 1, starts, since: Instant::now() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_header_shows_the_runtime_its_event_source_and_the_health_of_each_service() {
        let overview = Overview {
            rows: vec![
                row("probe-service a", "serving"),
                row("probe-service b", "serving"),
                row("pod-sync", "unreachable"),
            ],
            runtime: Some(ProxyInfoReply {
                runtime_name: "containerd".into(),
                runtime_version: "1.6.20~ds1".into(),
                ..ProxyInfoReply::default()
            }),
            pleg: Some(HealthReply {
                hint_source: "containerd".into(),
                hints_live: true,
                relist_period_seconds: 30.0,
                ..HealthReply::default()
            }),
            runtime_error: None,
        };
        let states = [("probe-service", running(1)), ("pod-sync", running(2))];
        let head = |overview: &Overview| header().all(Some(overview), &states, 120);
        assert_eq!(head(&overview)[3], "  probe-service ok x2   pod-sync starting (1 restart)");
        tokio::time::advance(STARTUP_TIME).await;
        assert_eq!(
            head(&overview),
            [
                "quintlet 0.1.0  standalone on host \"vm\"  (no API server; manifests from examples)",
                "  runtime   containerd 1.6.20  private, .run/containerd/containerd.sock   events: containerd   relist every 30s",
                "  sockets   .run/run   logs .run/logs",
                "  probe-service ok x2   pod-sync unreachable (1 restart)",
            ]
        );
        let failed = Overview { runtime_error: Some("does not answer for 3s".into()), ..overview };
        assert!(head(&failed)[1].ends_with("   ! does not answer for 3s"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_running_process_is_not_ok_before_it_reports_health() {
        let states = [("pod-sync", running(1)), ("cri-proxy", ServiceState::New)];
        assert_eq!(services(None, &states, 80), "  pod-sync starting   cri-proxy starting");
        let ended = ServiceState::Waiting { exit: "SIGKILL".into(), delay: Duration::ZERO };
        assert_eq!(services(None, &[("pod-sync", ended)], 80), "  pod-sync exited (SIGKILL)");
    }

    #[tokio::test(start_paused = true)]
    async fn a_narrow_terminal_names_only_services_that_are_not_ok() {
        let all = ["cri-proxy", "pleg-service", "pod-sync"];
        let states = all.map(|name| (name, running(1)));
        let mut overview =
            Overview { rows: all.map(|name| row(name, "serving")).to_vec(), ..Overview::default() };
        assert_eq!(services(Some(&overview), &states, 40), "  3 services ok");
        tokio::time::advance(STARTUP_TIME).await;
        overview.rows[1] = row("pleg-service", "unhealthy");
        assert_eq!(services(Some(&overview), &states, 40), "  2 of 3 ok   pleg-service unhealthy");
    }
}
