//! The five binaries and quintctl with configuration files: rejected files, printed values, precedence.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use quintlet_e2e::bins::{self, SERVICES};
use quintlet_e2e::{LONG, ports, until};

const KUBELET: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
const OWN: &str = "---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n";

fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// The five services of every node, and node-api.
const ALL: [&str; 6] = [SERVICES[0], SERVICES[1], SERVICES[2], SERVICES[3], SERVICES[4], "node-api"];

fn command(name: &str) -> Command {
    Command::new(bins::dir().join(name))
}

fn run(name: &str, args: &[&str]) -> Output {
    command(name).args(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn an_invalid_file_ends_every_service_with_code_64_and_all_errors() {
    let dir = tempfile::tempdir().unwrap();
    let bad =
        format!("{KUBELET}syncFrequency: \"5\"\nmaxPods: many\nevictionHardd: {{}}\n{OWN}runDirr: /x\n");
    let file = write(dir.path(), "bad.yaml", &bad);
    let file = file.to_str().unwrap();
    let want = format!(
        "quintlet: 3 problems in {file}\n  line 3  syncFrequency: \"5\": a duration needs a unit, e.g. 5s\n  \
         line 4  maxPods: \"many\": must be a whole number\n  line 9  runDirr: unknown field (did you mean runDir?)\n  \
         warning: line 5  evictionHardd: unknown field, ignored (did you mean evictionHard?)\n"
    );
    let lines: Vec<(&str, Vec<&str>)> = ALL
        .into_iter()
        .map(|name| (name, vec!["--config", file]))
        .chain([("quintctl", vec!["up", "--config", file]), ("quintctl", vec!["config", file])])
        .collect();
    for (name, line) in lines {
        let ended = run(name, &line);
        assert_eq!((ended.status.code(), text(&ended.stderr)), (Some(64), want.clone()), "{name} {line:?}");
        assert_eq!(text(&ended.stdout), "", "{name}");
    }
}

#[test]
fn thresholds_that_contradict_each_other_on_this_machine_end_pod_sync_with_code_64_and_their_line() {
    let dir = tempfile::tempdir().unwrap();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kibibytes: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let hard = kibibytes / 50;
    let file = format!(
        "{KUBELET}failSwapOn: false\nevictionHard: {{memory.available: {hard}Ki}}\nevictionSoft:\n  memory.available: 1%\n\
         evictionSoftGracePeriod: {{memory.available: 1m}}\n{OWN}rootDir: root\nrunDir: run\n"
    );
    let file = write(dir.path(), "config.yaml", &file);
    let file = file.to_str().unwrap();
    let ended = run("pod-sync", &["--config", file]);
    let stderr = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(64), "{stderr}");
    let start = format!("quintlet: 1 problem in {file}\n  line 6  evictionSoft.memory.available: 1% of ");
    assert!(stderr.starts_with(&start), "{stderr}");
    assert!(
        stderr.contains(" is not above evictionHard.memory.available ")
            && stderr.ends_with(", and has no effect\n"),
        "{stderr}"
    );
    assert_eq!(text(&ended.stdout), "");
    assert!(!dir.path().join("root").exists() && !dir.path().join("run").exists(), "nothing was started");
}

#[test]
fn every_service_prints_its_configuration_with_origins() {
    let dir = tempfile::tempdir().unwrap();
    let file =
        write(dir.path(), "c.yaml", &format!("{KUBELET}maxPods: 5\nclusterDomain: a\nevictionHardd: {{}}\n"));
    let drop_ins = dir.path().join("d");
    std::fs::create_dir(&drop_ins).unwrap();
    let drop_in = write(&drop_ins, "10.conf", &format!("{KUBELET}clusterDomain: b\n"));
    let [file, drop_ins, drop_in] = [file, drop_ins, drop_in].map(|p| p.display().to_string());
    for name in ALL {
        let line = ["--config", &file, "--config-dir", &drop_ins, "--run-dir", "/r", "--print-config"];
        let printed = run(name, &line);
        assert_eq!(printed.status.code(), Some(0), "{name}: {}", text(&printed.stderr));
        let out = text(&printed.stdout);
        for line in [
            format!("maxPods: 5   # {file}:3"),
            format!("clusterDomain: b   # {drop_in}:3"),
            "fileCheckFrequency: 20s   # default".to_owned(),
            "runDir: /r   # flag --run-dir".to_owned(),
        ] {
            assert!(out.lines().any(|l| l == line), "{name}: {line}\n{out}");
        }
        assert!(text(&printed.stderr).contains("warning: line 5  evictionHardd: unknown field"), "{name}");
        let strict = run(name, &[&line[..], &["--strict"]].concat());
        assert_eq!(strict.status.code(), Some(64), "{name}");

        // The printed configuration has the same values.
        let again = write(dir.path(), "again.yaml", &out);
        let again = run(name, &["--config", again.to_str().unwrap(), "--print-config", "--strict"]);
        let values = |out: &str| -> Vec<String> {
            out.lines().map(|l| l.split("   # ").next().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(values(&text(&again.stdout)), values(&out), "{name}: {}", text(&again.stderr));
    }
}

#[test]
fn help_names_the_configuration_and_defaults_with_units() {
    for name in ALL {
        let help = run(name, &["--help"]);
        let out = text(&help.stdout);
        assert_eq!(help.status.code(), Some(0), "{name}");
        for flag in ["--config <FILE>", "--config-dir <DIR>", "--print-config", "--strict", "--run-dir <DIR>"]
        {
            assert!(out.contains(flag), "{name}: {flag}\n{out}");
        }
    }
    let out = text(&run("pod-sync", &["--help"]).stdout);
    for default in ["[default: 1m]", "[default: 110]", "[default: 100ms]", "[default: 5m]"] {
        assert!(out.contains(default), "{default}\n{out}");
    }
}

/// Services that are killed when the test ends in any way, and a directory with pod-sync's root, which
/// pod-sync leaves bind-mounted on itself.
struct Base(tempfile::TempDir);

impl Base {
    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        let _not_mounted = nix::mount::umount2(&self.path().join("root"), nix::mount::MntFlags::MNT_DETACH);
    }
}

struct Running(Vec<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn metrics(port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A file without flags sets sockets, logs and metrics; a field without an effect is reported once.
async fn a_file_alone() -> (Base, Running, [u16; 6]) {
    let dir = Base(tempfile::tempdir().unwrap());
    let at = |name: &str| dir.path().join(name).display().to_string();
    let [port, ports @ ..] = ports::free::<7>();
    let mut file = format!(
        "{KUBELET}containerRuntimeEndpoint: unix://{}\nstaticPodPath: manifests\npodLogsDir: {}\ncgroupRoot: /quintlet-config-test\n\
         cgroupsPerQOS: false\nenforceNodeAllocatable: []\nfailSwapOn: false\nfailCgroupV1: false\nvolumePluginDir: /v\nlogging: {{format: json, verbosity: 4}}\n\
         port: {port}\nhealthzPort: 0\nauthentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}\n\
         authorization: {{mode: AlwaysAllow}}\n{OWN}setKernelTunables: false\ncertDir: pki\nrunDir: {}\nrootDir: {}\ncontainerLogsDir: {}\nnodeName: config-test\nmetricsListen:\n",
        at("no-runtime.sock"),
        at("pod-logs"),
        at("run"),
        at("root"),
        at("container-logs"),
    );
    for (field, port) in
        ["criProxy", "plegService", "probeService", "statusReporter", "podSync", "nodeApi"].iter().zip(ports)
    {
        writeln!(file, "  {field}: 127.0.0.1:{port}").unwrap();
    }
    std::fs::create_dir(dir.path().join("manifests")).unwrap();
    let file = write(dir.path(), "config.yaml", &file);
    let start = |name: &str| {
        let log = std::fs::File::create(dir.path().join(format!("{name}.log"))).unwrap();
        command(name)
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    };
    let running = Running(ALL.map(start).into());
    for socket in [
        "cri/sync/cri.sock",
        "pleg/pleg.sock",
        "probe/0.sock",
        "status/status.sock",
        "podsync/podsync.sock",
        "node-api/node-api.sock",
    ] {
        let path = dir.path().join("run").join(socket);
        until(socket, LONG, async || if path.exists() { Ok(()) } else { Err("no socket") }).await;
    }
    (dir, running, ports)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_alone_configures_all_five_services() {
    let (dir, mut running, _) = a_file_alone().await;
    assert!(dir.path().join("root").is_dir() && dir.path().join("pod-logs").is_dir());
    for (name, child) in ALL.iter().zip(&mut running.0) {
        let log = dir.path().join(format!("{name}.log"));
        until(&format!("a line of {name}"), LONG, async || {
            let text = std::fs::read_to_string(&log).unwrap();
            let lines: Vec<serde_json::Value> = text
                .lines()
                .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{name}: {e}: {l}")))
                .collect();
            if lines.is_empty() { Err(text) } else { Ok(()) }
        })
        .await;
        assert!(child.try_wait().unwrap().is_none(), "{name} runs on");
    }
    let log = std::fs::read_to_string(dir.path().join("pod-sync.log")).unwrap();
    let is_warning =
        |l: &&str| l.contains("configured field is ignored") && l.contains("volumePluginDir: /v");
    let named = log.lines().filter(is_warning).count();
    assert_eq!(named, 1, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_service_listens_at_its_configured_address() {
    let (_dir, _running, ports) = a_file_alone().await;
    for (name, port) in ALL.iter().zip(ports) {
        until(&format!("metrics of {name}"), LONG, async || match metrics(port) {
            Ok(answer) if answer.starts_with("HTTP/1.1 200") => Ok(()),
            Ok(answer) => Err(answer),
            Err(error) => Err(error.to_string()),
        })
        .await;
    }
}
