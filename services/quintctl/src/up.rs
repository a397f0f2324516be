//! `quintctl up`: supervises the services where neither systemd nor Kubernetes does.
//!
//! Tasks: one per service, and one that follows pod-sync's view of the pods. The main loop prints changes,
//! checks the expectations with `--once`, and waits for a signal. The shutdown is ordered: with `--down`
//! pod-sync first terminates all pods; then pod-sync stops, then the services that it calls, cri-proxy, and
//! the private containerd. A second signal skips all waits.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quintlet_agents::{OtherAgent, ProcessTable};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::build::has_program;
use quintlet_kit::task::{self, TaskGroup};
use quintlet_localnode::{Containerd, Options};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::screen;
use crate::view::{self, View};
pub use args::{ServiceArgument, UpArgs};
use error::SOCKET_PATH_MAX;
pub use error::UpError;
use expect::{Comparison, ExpectationChecker};
use handover::{Copies, CopyKind};
use lines::{Lines, print, print_part};
use names::{NODE_API, POD_SYNC, SERVICES, STOP_ORDER};
use plan::{Layout, Runtime};
use processes::Processes;
use service::{Order, Service, ServiceBinary, ServiceState};
use users::Users;

mod args;
mod error;
mod expect;
mod handover;
mod head;
mod kills;
mod lines;
mod names;
mod plan;
mod processes;
mod restarts;
mod service;
mod users;

/// Default endpoint of the runtime.
const RUNTIME_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";

/// Time for the drain in addition to the longest grace period of the pods.
const DRAIN_MARGIN: Duration = Duration::from_secs(10);

/// Name of the private containerd's log.
const CONTAINERD: &str = "containerd";

/// Time limit for tasks to stop after their services have exited.
const TASK_GRACE: Duration = Duration::from_secs(1);

/// Interval of checks of the expectations without a change, since some depend on time alone.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Runs the services until a signal, or with `--once` until all pods have settled.
///
/// # Errors
/// The services cannot be started, or the private containerd cannot be removed at the end.
pub async fn run(args: UpArgs) -> Result<ExitCode, UpError> {
    let mut signals = Signals::new()?;
    let cwd = std::env::current_dir()
        .map_err(|source| UpError::Os { action: "get the current directory", source })?;
    let layout = Layout::resolve(&args, &cwd);
    let bin_dir = bin_dir(&args)?;
    let binaries = check(&args, &layout, &bin_dir)?;
    let node = args.node_name.clone().unwrap_or_else(quintlet_kit::args::host_name);
    let mut checker = expectations(&args, &layout, &node)?;

    let machine = ProcessTable::default();
    let is_used =
        |process| UpError::OtherAgent(OtherAgent::Kubelet { root_dir: layout.root_dir.clone(), process });
    machine.kubelet_of(&layout.root_dir).map_or(Ok(()), |process| Err(is_used(process)))?;
    let (processes, left) = Processes::take_over(&layout.control).await?;
    // Services of an earlier run, which have ended now, held the lock of the root directory, too.
    machine.agent_of(&layout.root_dir).map_or(Ok(()), |other| Err(UpError::OtherAgent(other)))?;
    if !left.is_empty() {
        print(&[format!("terminated services of an earlier run: {}", left.join(", "))]);
    }
    std::fs::create_dir_all(&layout.log_dir)
        .map_err(|source| UpError::Directory { path: layout.log_dir.clone(), source })?;
    // Dropping the future on a signal stops the containerd that it has started.
    let containerd = tokio::select! {
        started = start_containerd(&args, &layout) => started?,
        () = signals.next() => return Ok(ExitCode::from(130)),
    };
    let runtime = runtime(&args, containerd.as_ref());
    let header = head::Header::new(&args, &layout, &runtime.endpoint, &node, &cwd);
    print(&header.lines());

    let tasks = TaskGroup::new();
    let users = users_of_services(&args, &layout, &bin_dir)?;
    let copies = prepare(&args, &layout, users)?;
    let copying = task::spawn("refresh file copies", copies.keep_refreshed());
    let plans = plan::services(&args, &layout, &runtime, &node, users);
    let written = plans.iter().map(|plan| plan.name).chain(containerd.as_ref().map(|_| CONTAINERD)).collect();
    let limits = quintctl_service_logs::Limits { size: args.log_max_size << 20, files: args.log_max_files };
    let services = start_services(plans, &args, &layout, &binaries, processes, &tasks)?;
    let rotation = task::spawn(
        "rotate logs",
        quintctl_service_logs::rotate_periodically(layout.log_dir.clone(), written, limits),
    );
    let (views, mut view) = watch::channel(View::default());
    let follower = task::spawn("follow pods", view::follow(layout.podsync_socket(), views));

    let began = Instant::now();
    let outcome = if !args.once && screen::is_possible() {
        match show_screen(&services, &header, &layout, &view, &mut signals).await {
            Ok(()) => None,
            Err(error) => {
                tracing::warn!(
                    error = quintlet_kit::error_chain(&error),
                    "live table failed, printing lines"
                );
                attend(&mut view, &mut signals, None, began, &args).await
            }
        }
    } else {
        for service in &services {
            tasks.spawn("print restarts", print_restarts(service.name, service.state()));
        }
        attend(&mut view, &mut signals, checker.as_mut(), began, &args).await
    };
    let result =
        outcome.map_or(ExitCode::SUCCESS, |same| if same { ExitCode::SUCCESS } else { ExitCode::FAILURE });

    stop(&args, &services, &view, containerd, &mut signals).await?;
    follower.abort();
    rotation.abort();
    copying.abort();
    for name in tasks.shutdown(TASK_GRACE).await {
        tracing::warn!(task = name, "task did not stop in time");
    }
    Ok(result)
}

fn runtime(args: &UpArgs, containerd: Option<&Containerd>) -> Runtime {
    Runtime {
        endpoint: containerd
            .map(Containerd::endpoint)
            .or_else(|| args.runtime_endpoint.clone())
            .unwrap_or_else(|| RUNTIME_ENDPOINT.to_owned()),
        cgroup_root: args
            .cgroup_root
            .clone()
            .or_else(|| containerd.map(Containerd::cgroup_root))
            .unwrap_or_else(|| "/".to_owned()),
    }
}

fn start_services(
    plans: Vec<plan::ServiceCommand>,
    args: &UpArgs,
    layout: &Layout,
    binaries: &BTreeMap<&'static str, ServiceBinary>,
    processes: Processes,
    tasks: &TaskGroup,
) -> Result<Vec<Service>, UpError> {
    let now = quintlet_kit::clock::Clock::system().wall();
    for plan in &plans {
        quintctl_service_logs::append_start_line(
            &quintctl_service_logs::path(&layout.log_dir, plan.name),
            &args.log_format,
            now,
        )
        .map_err(|source| UpError::Directory { path: layout.log_dir.clone(), source })?;
    }
    let processes = Arc::new(Mutex::new(processes));
    let paths = Paths::new(&layout.run_dir);
    let start = |plan: plan::ServiceCommand| {
        // `check` has found one for each service.
        let binary = binaries.get(plan.binary)?.clone();
        Some(Service::start(plan, binary, &layout.log_dir, &paths, Arc::clone(&processes), tasks))
    };
    Ok(plans.into_iter().filter_map(start).collect())
}

/// Shows the live table until the user closes it or a signal arrives.
async fn show_screen(
    services: &[Service],
    header: &head::Header,
    layout: &Layout,
    view: &watch::Receiver<View>,
    signals: &mut Signals,
) -> Result<(), crate::error::Error> {
    let paths = Paths::new(&layout.run_dir);
    let states: Vec<_> = services.iter().map(|s| (s.name, s.state())).collect();
    let (overviews, overview) = watch::channel(None);
    let polling = task::spawn("poll health", head::poll_health(paths.clone(), overviews));
    let kills = kills::kills(states.clone(), paths.clone(), view.clone());
    let lines = |width| {
        let now: Vec<_> = states.iter().map(|(name, state)| (*name, state.borrow().clone())).collect();
        header.all(overview.borrow().as_ref(), &now, width)
    };
    let places = screen::Places { paths, pod_logs_dir: layout.pod_logs_dir.clone() };
    // Dropping the screen restores the terminal.
    let shown = tokio::select! {
        shown = screen::run(places, view.clone(), lines, Some(kills)) => shown,
        () = signals.next() => Ok(()),
    };
    polling.abort();
    shown
}

/// Prints changes until a signal, which returns none, or until the expectations are decided, which returns
/// whether they are met.
async fn attend(
    view: &mut watch::Receiver<View>,
    signals: &mut Signals,
    mut checker: Option<&mut ExpectationChecker>,
    began: Instant,
    args: &UpArgs,
) -> Option<bool> {
    let deadline = began + Duration::from_secs(args.once_timeout);
    let mut lines = Lines::default();
    let mut period = tokio::time::interval(CHECK_PERIOD);
    loop {
        // All arms only wait; dropping them loses nothing.
        tokio::select! {
            () = signals.next() => return None,
            changed = view.changed() => {
                // The task that follows pod-sync ends after its receivers; None is unreachable here.
                changed.ok()?;
                let changes = lines.changes(&view.borrow_and_update());
                print(&changes);
            }
            _ = period.tick() => {}
        }
        let Some(checker) = checker.as_deref_mut() else { continue };
        let now = Instant::now();
        let differences = match checker.check(&view.borrow(), now) {
            Comparison::Same => {
                let took = now.duration_since(began).as_secs_f64();
                print(&[format!("{0} of {0} as expected after {took:.1}s", checker.len())]);
                return Some(true);
            }
            Comparison::Different(differences) => differences,
            Comparison::Pending if now >= deadline => {
                print(&[format!("not settled after {}s", args.once_timeout)]);
                checker.differences()
            }
            Comparison::Pending => continue,
        };
        print(&differences);
        return Some(false);
    }
}

async fn stop(
    args: &UpArgs,
    services: &[Service],
    view: &watch::Receiver<View>,
    containerd: Option<Containerd>,
    signals: &mut Signals,
) -> Result<(), UpError> {
    let began = Instant::now();
    let (pods, grace) = view.borrow().unfinished();
    let noun = if pods == 1 { "pod" } else { "pods" };
    if args.down {
        print_part(&format!("stopping {pods} {noun} (grace {grace}s, press again to force) … "));
    } else {
        print_part(&format!("stopping the services, {pods} {noun} keep running … "));
    }
    let in_order = async {
        if args.down {
            drain(services, Duration::from_secs(grace) + DRAIN_MARGIN).await;
        }
        for group in STOP_ORDER {
            let group: Vec<&Service> =
                services.iter().filter(|s| group.contains(&names::service_of(s.name))).collect();
            group.iter().for_each(|s| s.order(Order::Stop));
            futures::future::join_all(group.iter().map(|s| s.ended())).await;
        }
    };
    // A second signal drops the ordered shutdown, which only sends orders and waits.
    let forced = tokio::select! {
        () = in_order => false,
        () = signals.next() => true,
    };
    if forced {
        services.iter().for_each(|s| s.order(Order::Kill));
        futures::future::join_all(services.iter().map(Service::ended)).await;
    }
    let private = containerd.is_some();
    if let Some(containerd) = containerd {
        if args.down {
            containerd.down().await.map_err(UpError::Containerd)?;
        } else {
            containerd.stop().await;
        }
    }
    let remaining = view.borrow().pods.len();
    let left = match (args.down, private || remaining == 0) {
        (true, true) => ", nothing left behind".to_owned(),
        (true, false) => format!(", {remaining} pods may remain"),
        (false, _) => String::new(),
    };
    print(&[format!("done in {:.1}s{left}", began.elapsed().as_secs_f64())]);
    Ok(())
}

/// Orders pod-sync to terminate all pods and waits until it exits.
async fn drain(services: &[Service], within: Duration) {
    let Some(pod_sync) = services.iter().find(|s| s.name == POD_SYNC) else { return };
    // A pod-sync that is restarting is not drained. Its pods are removed together with a private runtime.
    if pod_sync.is_running() {
        pod_sync.order(Order::Drain);
        if tokio::time::timeout(within, pod_sync.ended()).await.is_err() {
            tracing::warn!(seconds = within.as_secs(), "pod-sync did not exit in time");
        }
    }
}

async fn start_containerd(args: &UpArgs, layout: &Layout) -> Result<Option<Containerd>, UpError> {
    if !args.private_containerd {
        return Ok(None);
    }
    let mut options = Options::new(&layout.containerd);
    options.masquerade = true;
    options.keep_pods = !args.down;
    let log = quintctl_service_logs::path(&layout.log_dir, CONTAINERD);
    // Created here, since containerd would create its log with another mode.
    quintctl_service_logs::open(&log)
        .map_err(|source| UpError::Directory { path: layout.log_dir.clone(), source })?;
    options.log_file = Some(log);
    if args.down {
        let owned = [&layout.root_dir, &layout.run_dir, &layout.pod_logs_dir, &layout.container_logs_dir];
        options.owned = owned.map(PathBuf::clone).to_vec();
    }
    let containerd = Containerd::start(options).await.map_err(UpError::Containerd)?;
    containerd.import_local_images().await.map_err(UpError::Containerd)?;
    Ok(Some(containerd))
}

/// Prints the exits and restarts of a service.
async fn print_restarts(name: &'static str, mut state: watch::Receiver<ServiceState>) {
    while state.changed().await.is_ok() {
        let line = match &*state.borrow_and_update() {
            ServiceState::Waiting { exit, delay } => {
                Some(format!("{name} exited ({exit}), restarting in {} ms", delay.as_millis()))
            }
            ServiceState::Running { pid, starts, .. } if *starts > 1 => {
                Some(format!("{name} restarted, pid {pid}"))
            }
            ServiceState::New | ServiceState::Running { .. } | ServiceState::Ended => None,
        };
        print(line.as_slice());
    }
}

fn expectations(args: &UpArgs, layout: &Layout, node: &str) -> Result<Option<ExpectationChecker>, UpError> {
    if !args.once {
        return Ok(None);
    }
    let found = expect::read_dir(&layout.manifests)
        .map_err(|source| UpError::Directory { path: layout.manifests.clone(), source })?;
    if found.is_empty() {
        return Err(UpError::NothingExpected(layout.manifests.clone()));
    }
    Ok(Some(ExpectationChecker::new(found, node)))
}

/// Returns the users of the services, or none to run all services as the user of this process.
///
/// Without root, none. A node with a private containerd may be in a home directory that other users cannot
/// enter: none, so that its services run as root.
fn users_of_services(args: &UpArgs, layout: &Layout, bin_dir: &Path) -> Result<Option<Users>, UpError> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    let users = Users::of(args);
    let names = [
        ("pleg-service", "--pleg-uid"),
        ("probe-service", "--probe-uid"),
        ("status-reporter", "--reporter-uid"),
        (NODE_API, "--node-api-uid"),
    ];
    for (service, flag) in names {
        let Some(user) = users.user(service) else { continue };
        for path in [bin_dir, &layout.run_dir] {
            let Some(dir) = users::inaccessible_ancestor(path) else { continue };
            if args.private_containerd {
                print(&[format!("all services run as root: other users cannot enter {}", dir.display())]);
                return Ok(None);
            }
            return Err(UpError::Inaccessible {
                service,
                uid: user.uid,
                dir,
                path: path.to_path_buf(),
                flag,
            });
        }
    }
    Ok(Some(users))
}

/// Creates the directories of the sockets, and copies the files that services may not read themselves.
fn prepare(args: &UpArgs, layout: &Layout, users: Option<Users>) -> Result<Copies, UpError> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source: io::Error| UpError::Directory { path, source }
    };
    if !plan::has_node_api(args) {
        // `quintctl health` would report the socket of an earlier run as unreachable.
        let _ = std::fs::remove_file(Paths::new(&layout.run_dir).node_api());
    }
    let node_api = users.and_then(|users| users.user(NODE_API)).map(|user| user.uid);
    if plan::has_node_api(args) {
        handover::prepare_cert_dir(&layout.cert_dir, node_api).map_err(failed(&layout.cert_dir))?;
    }
    let Some(users) = users else { return Ok(Copies::default()) };
    users.prepare(&layout.run_dir).map_err(failed(&layout.run_dir))?;
    let files = plan::file_copies(args, layout, Some(users));
    if layout.config_dir.is_some() {
        users.prepare_drop_ins(&layout.run_dir, plan::CONFIG_DIR).map_err(failed(&layout.run_dir))?;
    }
    let (copies, not_copied) = Copies::make(files);
    for (file, source) in not_copied {
        if file.kind == CopyKind::Kubeconfig {
            return Err(UpError::Kubeconfig { path: file.from, source });
        }
        print(&[format!("failed to copy {} for {}: {source}", file.from.display(), file.service)]);
    }
    Ok(copies)
}

fn own_path() -> Result<PathBuf, UpError> {
    std::env::current_exe().map_err(|source| UpError::Os { action: "get the path of this program", source })
}

fn bin_dir(args: &UpArgs) -> Result<PathBuf, UpError> {
    if let Some(dir) = &args.bin_dir {
        return Ok(dir.clone());
    }
    Ok(own_path()?.parent().unwrap_or(Path::new("/")).to_path_buf())
}

/// Checks the paths. Returns the binary of each service: a file of its name or, without one, this binary if
/// it has the program.
fn check(
    args: &UpArgs,
    layout: &Layout,
    bin_dir: &Path,
) -> Result<BTreeMap<&'static str, ServiceBinary>, UpError> {
    let wanted = SERVICES.into_iter().chain(Some(NODE_API).filter(|_| plan::has_node_api(args)));
    let own = own_path()?;
    let all = |name| Some(own.as_path()).filter(|_| args.bin_dir.is_none() && has_program(name));
    let found: Vec<_> = wanted.map(|name| (name, ServiceBinary::find(name, bin_dir, all(name)))).collect();
    let names: Vec<_> = found.iter().filter(|(_, found)| found.is_none()).map(|(name, _)| *name).collect();
    if !names.is_empty() {
        return Err(UpError::NoBinaries { names, dir: bin_dir.to_path_buf() });
    }
    let socket = layout.longest_socket();
    if socket.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(UpError::SocketPath(socket));
    }
    Ok(found.into_iter().filter_map(|(name, found)| Some((name, found?))).collect())
}

/// The signals that stop the supervisor.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> Result<Self, UpError> {
        let listen =
            |kind| signal(kind).map_err(|source| UpError::Os { action: "listen for signals", source });
        Ok(Self([
            listen(SignalKind::interrupt())?,
            listen(SignalKind::terminate())?,
            listen(SignalKind::hangup())?,
        ]))
    }

    /// Waits for the next signal.
    ///
    /// Cancellation safety: dropping the future loses no signal.
    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        // A signal that arrives stays in its stream until it is received.
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
