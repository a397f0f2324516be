//! A private system bus.

use std::path::Path;
use std::process::{Child, Command, Stdio};

const CONFIG: &str = r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>ADDRESS</listen><auth>EXTERNAL</auth><policy context="default">
<allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy></busconfig>"#;

/// Returns the address of the bus in this directory.
pub(crate) fn address(dir: &Path) -> String {
    format!("unix:path={}", dir.join("bus").display())
}

/// Starts a bus. It accepts connections some time later.
pub(crate) fn spawn(dir: &Path) -> Child {
    let config = dir.join("bus.conf");
    std::fs::write(&config, CONFIG.replace("ADDRESS", &address(dir))).expect("a file can be written");
    let _not_there = std::fs::remove_file(dir.join("bus"));
    Command::new("dbus-daemon")
        .args(["--nofork", "--nopidfile", "--nosyslog", "--config-file"])
        .arg(&config)
        .stdin(Stdio::null())
        .spawn()
        .expect("dbus-daemon starts: scripts/install.sh test")
}
