//! All services start, fail and stop in the same way.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PROGRAM: &str = env!("CARGO_BIN_EXE_quintlet");

fn command(name: &str, args: &[&str], run_dir: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg(name).arg("--run-dir").arg(run_dir).args(args).stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

#[test]
fn the_program_has_a_fixed_address() {
    // The field e_type of an ELF header, and its value ET_EXEC.
    let (of_type, executable) = (16..18, 2_u16.to_ne_bytes());
    let header = std::fs::read(PROGRAM).unwrap();
    assert_eq!(header[of_type], executable, "relocations would make tables of addresses private memory");
}

#[test]
fn a_service_that_fails_to_start_logs_one_error_in_the_configured_format_and_exits_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let root = format!("--root-dir={}", file.join("root").display());
    let pod_sync = [root.as_str(), "--node-name=n"];
    for (name, args) in [
        ("cri-proxy", &[][..]),
        ("pleg-service", &[]),
        ("probe-service", &[]),
        ("status-reporter", &["--node-name=n"]),
        ("node-api", &[]),
        ("pod-sync", &pod_sync),
    ] {
        // No directory can be created below a file.
        let mut run = command(name, args, &file.join("run"));
        let output = run.args(["--log-format=json"]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with('{') && last.contains("\"service failed\""), "{name}: {text}");
        assert!(last.to_lowercase().contains("\"error\""), "{name}: {text}");

        // Without a log, the error is a plain line.
        let output = run.arg("--log-level=off").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with(&format!("{name}: ")), "{name}: {text}");
        assert!(!text.contains("Caused by") && !text.contains("backtrace"), "{name}: {text}");
    }
}

/// Kills the process when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_service_whose_metrics_port_is_taken_logs_an_error_and_continues_until_sigterm() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = format!("--metrics-listen={}", taken.local_addr().unwrap());
    for name in ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "node-api"] {
        let dir = tempfile::tempdir().unwrap();
        let cert_dir = format!("--cert-dir={}", dir.path().join("pki").display());
        let more: &[&str] = match name {
            "status-reporter" => &["--node-name=n"],
            "node-api" => &[
                "--node-name=n",
                "--address=127.0.0.1",
                "--port=0",
                "--healthz-port=0",
                "--anonymous-auth=true",
                "--authentication-token-webhook=false",
                "--authorization-mode=AlwaysAllow",
                &cert_dir,
            ],
            _ => &[],
        };
        let args: Vec<&str> = more.iter().copied().chain([metrics.as_str()]).collect();
        let mut running = Running(command(name, &args, &dir.path().join("run")).spawn().unwrap());
        let mut lines = BufReader::new(running.0.stderr.take().unwrap()).lines();
        let mut seen = Vec::new();
        // The loop ends when the process does.
        let found = lines.by_ref().map(Result::unwrap).any(|line| {
            let found = line.contains("failed to serve metrics over HTTP");
            seen.push(line);
            found
        });
        assert!(found, "{name}: {seen:#?}");
        assert!(seen.last().unwrap().contains("ERROR"), "{name}: {seen:#?}");
        assert_eq!(running.0.try_wait().unwrap(), None, "{name} exited: {seen:#?}");
        let pid = i32::try_from(running.0.id()).unwrap();
        kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        assert_eq!(running.0.wait().unwrap().code(), Some(0), "{name}: {rest:#?}");
        let is_stop = |line: &String| line.contains("stopping service") && line.contains("Term");
        assert!(rest.iter().any(is_stop), "{name}: {rest:#?}");
    }
}
