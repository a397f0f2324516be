//! Permissions of the sockets: the tables in docs/design/sockets.md compared with the built services under
//! `quintctl up`, the systemd units and the files of docker.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_e2e::bins;
use quintlet_testapi::TestApi;
use quintlet_testkit::fake_runtime::{FakeRuntime, Options};

const LIMIT: Duration = Duration::from_secs(60);
const PAGE: &str = include_str!("../../../../docs/design/sockets.md");
const SYSUSERS: &str = include_str!("../../../../docker/systemd/quintlet.sysusers");
const TMPFILES: &str = include_str!("../../../../docker/systemd/quintlet.tmpfiles");
/// A UID and GID without an entry in any table.
const STRANGER: u32 = 54_321;
/// A GID of subscribers without an entry in any table.
const MEMBERS: u32 = 54_322;

/// A row of the table of sockets.
#[derive(Debug)]
struct Socket {
    name: String,
    server: String,
    all: BTreeSet<String>,
    health: BTreeSet<String>,
    owner: String,
    group: String,
    mode: u32,
}

/// A row of the table of users.
#[derive(Debug)]
struct User {
    name: String,
    uid: u32,
    groups: Vec<u32>,
}

/// Returns the cells of the table whose header begins with `first`.
fn table(first: &str) -> Vec<Vec<String>> {
    let clean = |cell: &str| cell.trim().trim_matches('`').to_owned();
    let rows = PAGE.lines().skip_while(|line| !line.starts_with(&format!("| {first} |"))).skip(2);
    let cells = |line: &str| line.trim_matches('|').split('|').map(clean).collect::<Vec<_>>();
    let rows: Vec<_> = rows.take_while(|line| line.starts_with('|')).map(cells).collect();
    assert!(!rows.is_empty(), "docs/design/sockets.md has no table {first:?}");
    rows
}

fn names(cell: &str) -> BTreeSet<String> {
    cell.split(',').map(|n| n.trim().to_owned()).filter(|n| !n.is_empty() && n != "–").collect()
}

fn sockets() -> Vec<Socket> {
    let rows = table("socket").into_iter();
    rows.map(|row| {
        let [name, server, all, health, directory] = row.try_into().unwrap();
        let (owners, mode) = directory.split_once(' ').unwrap();
        let (owner, group) = owners.split_once(':').unwrap();
        Socket {
            name,
            server,
            all: names(&all),
            health: names(&health),
            owner: owner.to_owned(),
            group: group.to_owned(),
            mode: u32::from_str_radix(mode, 8).unwrap(),
        }
    })
    .collect()
}

/// Returns users by their service, and groups by name.
fn users() -> (BTreeMap<String, User>, BTreeMap<String, u32>) {
    let mut groups = BTreeMap::from([("root".to_owned(), 0)]);
    let rows = table("service");
    for row in &rows {
        groups.insert(row[1].clone(), row[2].parse().unwrap());
    }
    let user = |row: &Vec<String>| User {
        name: row[1].clone(),
        uid: row[2].parse().unwrap(),
        groups: names(&row[3]).iter().map(|group| groups[group]).collect(),
    };
    let users = rows.iter().filter(|row| row[0] != "–").map(|row| (row[0].clone(), user(row))).collect();
    (users, groups)
}

/// `quintctl up` with the built services, an API server and a runtime in memory.
struct Up {
    dir: tempfile::TempDir,
    child: Child,
}

impl Up {
    fn start(dir: tempfile::TempDir, flags: &[&str]) -> Self {
        let path = |name: &str| dir.path().join(name);
        let out = std::fs::File::create(path("out")).unwrap();
        let bin_dir = bin_dir(dir.path());
        let child = Command::new(bin_dir.join("quintctl"))
            .args(["up", "--node-name", "sockets", "--healthz-port", "0"])
            .arg("--runtime-endpoint")
            .arg(format!("unix://{}", path("runtime.sock").display()))
            .arg("--base")
            .arg(dir.path())
            .arg("--bin-dir")
            .arg(&bin_dir)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        Self { dir, child }
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn end(&mut self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
    }

    fn output_text(&self) -> String {
        let mut out = std::fs::read_to_string(self.dir.path().join("out")).unwrap_or_default();
        for entry in std::fs::read_dir(self.dir.path().join("logs")).into_iter().flatten().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            let end: Vec<&str> = text.lines().rev().take(8).collect();
            out.push_str(&format!("-- {}\n{end:#?}\n", entry.path().display()));
        }
        out
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.end();
        }
        // pod-sync leaves its root directory as a shared mount, which is unmounted before the removal.
        let root = self.dir.path().join("root");
        if let Err(error) = nix::mount::umount(&root)
            && error != nix::errno::Errno::EINVAL
            && error != nix::errno::Errno::ENOENT
        {
            panic!("failed to unmount {}: {error}", root.display());
        }
    }
}

/// Returns a directory of the binaries that every user can enter: that of the build, or a copy below `place`.
fn bin_dir(place: &Path) -> PathBuf {
    let built = bins::dir();
    let is_open = |dir: &Path| std::fs::metadata(dir).is_ok_and(|m| m.mode() & 0o001 != 0);
    if built.ancestors().all(is_open) {
        return built;
    }
    let copy = place.join("bin");
    std::fs::create_dir(&copy).unwrap();
    std::fs::copy(built.join("quintlet"), copy.join("quintlet")).unwrap();
    for name in bins::SERVICES.into_iter().chain(["node-api", "quintctl"]) {
        std::os::unix::fs::symlink("quintlet", copy.join(name)).unwrap();
    }
    copy
}

/// Creates a directory that every user can enter.
fn place() -> tempfile::TempDir {
    let dir = tempfile::Builder::new().prefix("qsock-").tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::create_dir(dir.path().join("manifests")).unwrap();
    dir
}

fn connect(user: &User, words: &[&Path]) -> Command {
    let groups: Vec<String> = user.groups.iter().map(u32::to_string).collect();
    let groups = if groups.is_empty() { "-".to_owned() } else { groups.join(",") };
    let mut command = Command::new(env!("CARGO_BIN_EXE_connect"));
    command.args([user.uid.to_string(), user.uid.to_string(), groups]).args(words);
    command
}

fn path_of(run: &Path, socket: &str) -> PathBuf {
    let file = match socket {
        "probe" => "probe-0.sock".to_owned(),
        name if name.starts_with("cri/") => "cri.sock".to_owned(),
        name => format!("{name}.sock"),
    };
    run.join(socket).join(file)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_socket_is_open_only_to_the_users_in_the_table() {
    assert!(nix::unistd::geteuid().is_root(), "this test becomes other users: run it as root");
    let (sockets, (users, groups)) = (sockets(), users());
    let dir = place();
    let runtime = FakeRuntime::start(&dir.path().join("runtime.sock"), Options::default()).unwrap();
    let api = TestApi::start().await;
    let kubeconfig = dir.path().join("kubeconfig");
    api.kubeconfig(&kubeconfig).unwrap();
    // Readable only by root, as with a kubelet.
    let certificate = rcgen::generate_simple_self_signed(vec!["sockets".to_owned()]).unwrap();
    let [cert, key] = ["tls.crt", "tls.key"].map(|name| dir.path().join(name));
    std::fs::write(&cert, certificate.cert.pem()).unwrap();
    std::fs::write(&key, certificate.signing_key.serialize_pem()).unwrap();
    // The machine's cgroups are not used.
    let config = dir.path().join("config.yaml");
    let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncgroupsPerQOS: false\nenforceNodeAllocatable: []\n\
                failSwapOn: false\nfailCgroupV1: false\n---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nsetKernelTunables: false\n";
    std::fs::write(&config, text).unwrap();
    for file in [&kubeconfig, &cert, &key, &config] {
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let port = quintlet_e2e::ports::free::<1>()[0].to_string();
    let flags = [
        "--config",
        config.to_str().unwrap(),
        "--kubeconfig",
        kubeconfig.to_str().unwrap(),
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
        "--node-api-port",
        &port,
    ];
    let mut up = Up::start(dir, &flags);
    let run = up.run_dir();
    let paths: Vec<PathBuf> = sockets.iter().map(|s| path_of(&run, &s.name)).collect();
    for path in &paths {
        if let Err(error) = quintlet_kit::socket::wait_ready(path, LIMIT).await {
            panic!("{error}\n{}", up.output_text());
        }
    }

    let mut wrong = Vec::new();
    let all_groups: Vec<u32> = groups.values().copied().filter(|gid| *gid != 0).collect();
    let others = [
        // A user with no group and one with all groups: the user lists of the sockets suffice.
        ("stranger", User { name: "stranger".into(), uid: STRANGER, groups: Vec::new() }),
        ("stranger in all groups", User { name: "stranger".into(), uid: STRANGER, groups: all_groups }),
    ];
    let tried = users.iter().map(|(service, user)| (service.as_str(), user));
    for (service, user) in tried.chain(others.iter().map(|(name, user)| (*name, user))) {
        let words: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let output = connect(user, &words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.lines().count(), paths.len(), "{text}");
        for (socket, line) in sockets.iter().zip(text.lines()) {
            let got = line.split_once(' ').unwrap().1;
            let want = if user.uid == 0 || socket.server == service || socket.all.contains(service) {
                "all"
            } else if socket.health.contains(service) {
                "health"
            } else {
                "nothing"
            };
            if got != want {
                wrong.push(format!("{service} at {}: {got}, want {want}", socket.name));
            }
        }
    }
    // Mutating methods of pod-sync's socket are allowed only to root, even if other users may read.
    let podsync = path_of(&run, "podsync");
    for (service, user) in users.iter().map(|(service, user)| (service.as_str(), user)) {
        let output = connect(user, &[Path::new("retry"), &podsync]).output().unwrap();
        let got = String::from_utf8(output.stdout).unwrap();
        let may_connect = service == "node-api" || service == "status-reporter";
        let is_right = match got.trim() {
            "NotFound" => user.uid == 0,
            "PermissionDenied" => user.uid != 0 && may_connect,
            // The connection is refused.
            "Unavailable" | "Unknown" => user.uid != 0 && !may_connect,
            _ => false,
        };
        if !is_right {
            wrong.push(format!("PodSync.Retry by {service}: {got}"));
        }
    }
    // The owner of each socket and the users that may enter its directory.
    for (socket, path) in sockets.iter().zip(&paths) {
        let meta = std::fs::metadata(path.parent().unwrap()).unwrap();
        let owner = users.values().find(|user| user.name == socket.owner).map(|user| user.uid).unwrap();
        let want = (owner, groups[&socket.group], socket.mode);
        let got = (meta.uid(), meta.gid(), meta.mode() & 0o7777);
        if got != want {
            wrong.push(format!("directory of {}: {got:?}, want {want:?}", socket.name));
        }
        let stream = std::os::unix::net::UnixStream::connect(path).unwrap();
        let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials).unwrap();
        if peer.uid() != users[&socket.server].uid {
            wrong.push(format!("{} is served by uid {}", socket.name, peer.uid()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", up.output_text());

    // node-api serves with the key that only root can read, and its directory has no writable copy.
    let health = Command::new(bins::dir().join("quintctl"))
        .args(["health", "-o", "json", "--run-dir"])
        .arg(&run)
        .output()
        .unwrap();
    let rows: serde_json::Value = serde_json::from_slice(&health.stdout).unwrap();
    let node_api = rows.as_array().unwrap().iter().find(|row| row["service"] == "node-api").unwrap();
    assert_eq!(node_api["health"], "serving", "{rows:#}");
    let handed = run.join("handed/node-api/tls.key");
    let meta = std::fs::metadata(&handed).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (0, users["node-api"].uid, 0o440));
    // A node-api that cannot serve is reported by health and by the exit code.
    std::fs::write(&key, "no key").unwrap();
    let deadline = std::time::Instant::now() + LIMIT;
    while std::fs::read(&handed).unwrap() != b"no key" {
        assert!(std::time::Instant::now() < deadline, "the copy does not follow its original");
        std::thread::sleep(Duration::from_millis(50));
    }
    let pid = quintlet_pid(&path_of(&run, "node-api"));
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let log = up.dir.path().join("logs/node-api.log");
    let line = loop {
        let text = std::fs::read_to_string(&log).unwrap();
        if let Some(line) = text.lines().find(|line| line.contains("ERROR node-api service failed")) {
            break line.to_owned();
        }
        assert!(std::time::Instant::now() < deadline, "no error in the log: {text}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(line.contains("tls.key"), "{line}");
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("backtrace") && !text.contains("Caused by"), "{text}");
    let health = Command::new(bins::dir().join("quintctl")).args(["health", "--run-dir"]).arg(&run).output();
    let health = health.unwrap();
    assert_eq!(health.status.code(), Some(1), "{}", String::from_utf8_lossy(&health.stdout));
    up.end();
    drop(runtime);
}

/// Returns the outcome of a process with these IDs at each socket.
fn outcomes(uid: u32, gid: u32, groups: &str, sockets: &[PathBuf]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_connect"));
    command.args([uid.to_string(), gid.to_string(), groups.to_owned()]).args(sockets);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split_once(' ').unwrap().1.to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_socket_for_subscribers_is_open_only_to_the_configured_users_and_groups() {
    assert!(nix::unistd::geteuid().is_root(), "this test becomes other users: run it as root");
    let (users, groups) = users();
    let rows = table("socket of a subscriber");
    let kubelet = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncgroupsPerQOS: false\n\
                   enforceNodeAllocatable: []\nfailSwapOn: false\nfailCgroupV1: false\n---\n\
                   apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nsetKernelTunables: false\n";
    let configured = format!("{kubelet}subscribers: {{ uids: [\"{STRANGER}\"], gids: [\"{MEMBERS}\"] }}\n");
    for (text, is_configured) in [(configured.as_str(), true), (kubelet, false)] {
        let dir = place();
        let runtime = FakeRuntime::start(&dir.path().join("runtime.sock"), Options::default()).unwrap();
        let config = dir.path().join("config.yaml");
        std::fs::write(&config, text).unwrap();
        let mut up = Up::start(dir, &["--config", config.to_str().unwrap()]);
        let run = up.run_dir();
        for socket in ["pleg", "probe", "podsync"] {
            if let Err(error) = quintlet_kit::socket::wait_ready(&path_of(&run, socket), LIMIT).await {
                panic!("{error}\n{}", up.output_text());
            }
        }
        // A service that is ready has its socket for subscribers.
        let paths: Vec<PathBuf> = rows.iter().map(|row| run.join(row[0].replace("ID", "probe-0"))).collect();
        let exist = paths.iter().map(|path| path.exists()).collect::<Vec<_>>();
        assert_eq!(exist, vec![is_configured; 3], "{}", up.output_text());
        for (row, path) in rows.iter().zip(&paths) {
            let (owners, mode) = row[1].split_once(' ').unwrap();
            let (owner, group) = owners.split_once(':').unwrap();
            let owner = users.values().find(|user| user.name == owner).unwrap().uid;
            let want = (owner, groups[group], u32::from_str_radix(mode, 8).unwrap());
            let meta = std::fs::metadata(path.parent().unwrap()).unwrap();
            assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), want, "{}", path.display());
        }
        if is_configured {
            for (who, uid, gid, others, want) in [
                ("a listed user", STRANGER, STRANGER, "-", "all but health"),
                ("a member of a listed group", STRANGER + 7, MEMBERS, "-", "all but health"),
                (
                    "a process with a listed group among its others",
                    STRANGER + 7,
                    STRANGER + 7,
                    "54322",
                    "nothing",
                ),
                ("a stranger", STRANGER + 7, STRANGER + 7, "-", "nothing"),
            ] {
                assert_eq!(outcomes(uid, gid, others, &paths), [want; 3], "{who}");
            }
        }
        up.end();
        drop(runtime);
    }
}

/// The process that listens at a socket.
fn quintlet_pid(path: &Path) -> i32 {
    let stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials).unwrap().pid()
}

#[tokio::test]
async fn a_socket_that_another_user_planted_is_not_trusted() {
    let dir = place();
    // The directory is open to all users, and owned by root.
    std::fs::set_permissions(dir.path().join("manifests"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let planted = dir.path().join("manifests/pleg.sock");
    let stranger = User { name: "stranger".into(), uid: STRANGER, groups: Vec::new() };
    let mut child =
        connect(&stranger, &[Path::new("serve"), &planted]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let error = quintlet_kit::socket::connect(&planted).await.map(drop).unwrap_err();
    // A runtime's socket may be in a directory of another user, and must be owned by root.
    nix::unistd::chown(planted.parent().unwrap(), Some(STRANGER.into()), None).unwrap();
    let runtime = cri_proxy::upstream::Upstream::new(planted.clone()).ensure().await.unwrap_err();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(line, "listening\n");
    let runtime = runtime.to_string();
    let want = format!("the socket is served by uid {STRANGER} and not by root: not trusted");
    assert!(runtime.ends_with(&want) && runtime.contains("pleg.sock"), "{runtime}");
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains(&STRANGER.to_string()), "{error}");
}

#[test]
fn systemd_creates_the_users_and_directories_of_the_tables() {
    let (users, groups) = users();
    let lines = |text: &'static str, kind: &'static str| {
        let lines = text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
        lines.filter(move |words| words.first() == Some(&kind)).collect::<Vec<_>>()
    };
    let named: BTreeSet<&str> = lines(SYSUSERS, "u").iter().map(|words| words[1]).collect();
    let want: BTreeSet<&str> =
        users.values().map(|user| user.name.as_str()).filter(|name| *name != "root").collect();
    assert_eq!(named, want, "users");
    let group_lines = lines(SYSUSERS, "g");
    let made: BTreeSet<&str> = named.iter().copied().chain(group_lines.iter().map(|w| w[1])).collect();
    let want: BTreeSet<&str> = groups.keys().map(String::as_str).filter(|name| *name != "root").collect();
    assert_eq!(made, want, "groups");
    for socket in sockets() {
        let path = format!("/run/quintlet/{}", socket.name);
        let line = lines(TMPFILES, "d").into_iter().find(|words| words[1] == path).expect(&path);
        let mode = u32::from_str_radix(line[2], 8).unwrap();
        assert_eq!(
            (mode, line[3], line[4]),
            (socket.mode, socket.owner.as_str(), socket.group.as_str()),
            "{path}"
        );
    }
    for row in table("socket of a subscriber") {
        let socket = Path::new("/run/quintlet").join(&row[0]);
        let path = socket.parent().unwrap().to_str().unwrap();
        let line = lines(TMPFILES, "d").into_iter().find(|words| words[1] == path).expect(path);
        assert_eq!(format!("{}:{} {}", line[3], line[4], line[2]), row[1], "{path}");
    }
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docker/systemd");
    let unit =
        |service: &str| std::fs::read_to_string(units.join(format!("quintlet-{service}.service"))).unwrap();
    let by_gid: BTreeMap<u32, &String> = groups.iter().map(|(name, gid)| (*gid, name)).collect();
    for (service, user) in users.iter().filter(|(_, user)| user.uid != 0) {
        let text = unit(service);
        let has = |line: String| assert!(text.lines().any(|l| l == line), "{service} lacks {line}");
        has(format!("User={}", user.name));
        has(format!("Group={}", user.name));
        for group in &user.groups {
            has(format!("SupplementaryGroups={}", by_gid[group]));
        }
        assert_eq!(text.matches("SupplementaryGroups=").count(), user.groups.len(), "{service}");
    }
    // The user list of each server.
    for socket in sockets() {
        let text = unit(&socket.server);
        let cri = socket.name.strip_prefix("cri/");
        for (service, user) in
            users.iter().filter(|(service, user)| user.uid != 0 && **service != socket.server)
        {
            let allowed = match cri {
                Some(cri_socket) => format!("--allow-uid {cri_socket}={} ", user.name),
                None => format!("--allow-uid {} ", user.name),
            };
            let observer = format!("--observer-uid {} ", user.name);
            assert_eq!(text.contains(&allowed), socket.all.contains(service), "{}: {allowed}", socket.name);
            if cri.is_none() {
                assert_eq!(
                    text.contains(&observer),
                    socket.health.contains(service),
                    "{}: {observer}",
                    socket.name
                );
            }
        }
    }
}
