//! The head of the live table: what runs where, and how the services are by their own account.
//!
//! A task asks all services every second, more often while one is not ok; a service whose process runs and that does not
//! answer is not ok.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::paths::Paths;
use tokio::sync::watch;

use super::UpArgs;
use super::plan::Layout;
use super::service::State;
use crate::health::{self, Look};
use crate::text::clean;

/// Between two looks at all services.
const PERIOD: Duration = Duration::from_secs(1);

/// The same while one of them is not ok: its return is to be seen when it happens.
const IMPATIENT: Duration = Duration::from_millis(200);

/// A process that is no older and does not answer starts: that takes milliseconds, on a busy machine seconds.
const STARTS: Duration = Duration::from_secs(3);

/// What does not change while the services run.
#[derive(Debug, Clone)]
pub(super) struct Fixed {
    /// The first line.
    title: String,
    private: bool,
    endpoint: String,
    run_dir: String,
    log_dir: String,
}

impl Fixed {
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

    /// Before anything is known of the services.
    pub(super) fn lines(&self) -> Vec<String> {
        vec![self.title.clone(), self.runtime(None), self.places()]
    }

    /// The runtime by name once it is known, with what tells of its events.
    fn runtime(&self, look: Option<&Look>) -> String {
        let runtime = look.and_then(|l| l.runtime.as_ref()).filter(|r| !r.runtime_name.is_empty());
        let name = runtime.map_or_else(String::new, |r| {
            // As distributions call it: 1.6.20~ds1.
            let version = r.runtime_version.split(['~', '+']).next().unwrap_or_default();
            format!("{} {}  ", clean(&r.runtime_name), clean(version))
        });
        let private = if self.private { "private, " } else { "" };
        let mut line = format!("  runtime   {name}{private}{}", self.endpoint);
        if let Some(pleg) = look.and_then(|l| l.pleg.as_ref()) {
            let source = if pleg.hints_live { clean(&pleg.hint_source) } else { "none".to_owned() };
            line.push_str(&format!("   events: {source}   relist every {}s", pleg.relist_period_seconds));
        }
        if let Some(silent) = look.and_then(|l| l.silent.as_ref()) {
            line.push_str(&format!("   ! {}", clean(silent)));
        }
        line
    }

    fn places(&self) -> String {
        format!("  sockets   {}   logs {}", self.run_dir, self.log_dir)
    }

    /// All of it in `width` columns, how the services are as the last line.
    pub(super) fn all(
        &self,
        look: Option<&Look>,
        states: &[(&'static str, State)],
        width: usize,
    ) -> Vec<String> {
        vec![self.title.clone(), self.runtime(look), self.places(), services(look, states, width)]
    }
}

/// How one service is, in words.
fn word(name: &str, state: &State, look: Option<&Look>) -> String {
    let (restarts, young) = match state {
        State::New => return "starts".to_owned(),
        State::Waiting { exit, .. } => return format!("ended ({exit})"),
        State::Ended => return "ended".to_owned(),
        State::Running { starts, since, .. } => (starts - 1, since.elapsed() < STARTS),
    };
    let rows: Vec<&health::Row> =
        look.iter().flat_map(|l| &l.rows).filter(|r| r.service.split(' ').next() == Some(name)).collect();
    let mut word = match rows.iter().find(|r| !r.serving) {
        Some(_) if young => "starts".to_owned(),
        Some(ill) => ill.health.clone(),
        None if rows.is_empty() => "starts".to_owned(),
        None if name == "probe-service" => format!("ok x{}", rows.len()),
        None => "ok".to_owned(),
    };
    match restarts {
        0 => {}
        1 => word.push_str(" (1 restart)"),
        n => word.push_str(&format!(" ({n} restarts)")),
    }
    word
}

/// One line: each service, or where that is too long, those that are not ok.
fn services(look: Option<&Look>, states: &[(&'static str, State)], width: usize) -> String {
    let words: Vec<(&str, String)> =
        states.iter().map(|(name, state)| (*name, word(name, state, look))).collect();
    let list = |words: &[&(&str, String)]| {
        words.iter().map(|(name, word)| format!("{name} {word}")).collect::<Vec<_>>().join("   ")
    };
    let full = format!("  {}", list(&words.iter().collect::<Vec<_>>()));
    if full.chars().count() <= width {
        return full;
    }
    let ill: Vec<_> = words.iter().filter(|(_, word)| !word.starts_with("ok")).collect();
    let well = words.len() - ill.len();
    if ill.is_empty() {
        return format!("  {well} services ok");
    }
    format!("  {well} of {} ok   {}", words.len(), list(&ill))
}

/// Looks at all services until nobody is interested any more.
pub(super) async fn ask(paths: Paths, looks: watch::Sender<Option<Look>>) {
    while !looks.is_closed() {
        let look = health::look(&paths).await;
        let pause = if look.rows.iter().all(|r| r.serving) { PERIOD } else { IMPATIENT };
        looks.send_replace(Some(look));
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

    fn fixed() -> Fixed {
        let args = Cli::try_parse_from(["up", "--private-containerd", "--manifests", "examples"]).unwrap().up;
        let layout = Layout::resolve(&args, Path::new("/w"));
        Fixed::new(&args, &layout, "unix:///w/.run/containerd/containerd.sock", "vm", Path::new("/w"))
    }

    fn row(service: &str, health: &str) -> health::Row {
        health::Row {
            service: service.into(),
            serving: health == "serving",
            health: health.into(),
            detail: String::new(),
        }
    }

    fn running(starts: u32) -> State {
        State::Running { pid: 1, starts, since: Instant::now() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_head_names_the_runtime_its_events_and_how_each_service_is() {
        let look = Look {
            rows: vec![
                row("probe-service a", "serving"),
                row("probe-service b", "serving"),
                row("pod-sync", "no answer"),
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
            silent: None,
        };
        let states = [("probe-service", running(1)), ("pod-sync", running(2))];
        let head = |look: &Look| fixed().all(Some(look), &states, 120);
        assert_eq!(head(&look)[3], "  probe-service ok x2   pod-sync starts (1 restart)");
        tokio::time::advance(STARTS).await;
        assert_eq!(
            head(&look),
            [
                "quintlet 0.1.0  standalone on host \"vm\"  (no API server; manifests from examples)",
                "  runtime   containerd 1.6.20  private, .run/containerd/containerd.sock   events: containerd   relist every 30s",
                "  sockets   .run/run   logs .run/logs",
                "  probe-service ok x2   pod-sync no answer (1 restart)",
            ]
        );
        let silent = Look { silent: Some("does not answer for 3s".into()), ..look };
        assert!(head(&silent)[1].ends_with("   ! does not answer for 3s"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_runs_is_not_ok_before_it_says_so() {
        let states = [("pod-sync", running(1)), ("cri-proxy", State::New)];
        assert_eq!(services(None, &states, 80), "  pod-sync starts   cri-proxy starts");
        let ended = State::Waiting { exit: "SIGKILL".into(), delay: Duration::ZERO };
        assert_eq!(services(None, &[("pod-sync", ended)], 80), "  pod-sync ended (SIGKILL)");
    }

    #[tokio::test(start_paused = true)]
    async fn in_a_narrow_terminal_only_services_that_are_not_ok_are_named() {
        let all = ["cri-proxy", "pleg-service", "pod-sync"];
        let states = all.map(|name| (name, running(1)));
        let mut look = Look { rows: all.map(|name| row(name, "serving")).to_vec(), ..Look::default() };
        assert_eq!(services(Some(&look), &states, 40), "  3 services ok");
        tokio::time::advance(STARTS).await;
        look.rows[1] = row("pleg-service", "unhealthy");
        assert_eq!(services(Some(&look), &states, 40), "  2 of 3 ok   pleg-service unhealthy");
    }
}
