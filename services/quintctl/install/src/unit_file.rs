//! The command line of a unit of systemd, from its files. A unit of a kubelet has its arguments in variables
//! of three kinds of files.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// The program of a unit with its variables, after all of its files (systemd.service(5), systemd.exec(5)).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UnitCommand {
    /// The last `ExecStart=`, as it is written.
    pub(crate) exec_start: Option<String>,
    /// Variables of `Environment=`.
    pub(crate) environment: BTreeMap<String, String>,
    /// Files of `EnvironmentFile=`, in order. A `-` before a file that may be missing is removed.
    pub(crate) environment_files: Vec<PathBuf>,
}

impl UnitCommand {
    /// Parses the files of a unit: its own, then its drop-ins in systemd's order.
    pub(crate) fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut unit = Self::default();
        for text in texts {
            let text = text.replace("\\\n", " ");
            let mut is_service = false;
            for line in text.lines().map(str::trim) {
                if line.starts_with('[') {
                    is_service = line == "[Service]";
                } else if let Some((key, value)) =
                    line.split_once('=').filter(|_| is_service && !line.starts_with(['#', ';']))
                {
                    unit.set(key.trim(), value.trim());
                }
            }
        }
        unit
    }

    fn set(&mut self, key: &str, value: &str) {
        match key {
            // An empty value removes the values before it.
            "ExecStart" => self.exec_start = Some(value.to_owned()).filter(|value| !value.is_empty()),
            "Environment" if value.is_empty() => self.environment.clear(),
            "Environment" => {
                self.environment.extend(words(value).iter().filter_map(|word| pair(word)));
            }
            "EnvironmentFile" if value.is_empty() => self.environment_files.clear(),
            "EnvironmentFile" => self.environment_files.push(value.trim_start_matches('-').into()),
            _ => {}
        }
    }

    /// Adds the variables of a file of `EnvironmentFile=`.
    pub(crate) fn add_file(&mut self, text: &str) {
        let text = text.replace("\\\n", "");
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';']));
        self.environment.extend(lines.filter_map(|line| {
            let (name, value) = line.split_once('=')?;
            Some((name.trim().to_owned(), words(value).join(" ")))
        }));
    }

    /// Returns the program of `ExecStart=`.
    pub(crate) fn program(&self) -> Option<PathBuf> {
        let exec = self.exec_start.as_deref()?;
        Some(words(exec.trim_start_matches(PREFIXES)).first()?.into())
    }

    /// Returns the arguments of `ExecStart=` as they are written, without the program.
    pub(crate) fn raw_arguments(&self) -> &str {
        let exec = self.exec_start.as_deref().unwrap_or_default();
        // With `@`, the second word is the name that the program gets.
        let skipped = if prefix(exec).contains('@') { 2 } else { 1 };
        let mut rest = exec.trim_start_matches(PREFIXES);
        for _ in 0..skipped {
            rest = rest.split_once(char::is_whitespace).map_or("", |(_, rest)| rest).trim_start();
        }
        rest
    }

    /// Returns the arguments with the values of the variables.
    pub(crate) fn arguments(&self) -> Vec<String> {
        words(self.raw_arguments()).into_iter().flat_map(|word| self.expanded(&word)).collect()
    }

    fn expanded(&self, word: &str) -> Vec<String> {
        let value = |name: &str| self.environment.get(name).map(String::as_str).unwrap_or_default();
        // A word that is a variable becomes as many words as its value has, also in quotes.
        if let Some(name) = word.strip_prefix('$').filter(|name| is_name(name)) {
            return words(value(name));
        }
        let mut out = String::new();
        let mut rest = word;
        while let Some((before, after)) = rest.split_once('$') {
            out.push_str(before);
            if let Some((name, behind)) = after.strip_prefix('{').and_then(|after| after.split_once('}')) {
                out.push_str(value(name));
                rest = behind;
            } else {
                out.push('$');
                rest = after.strip_prefix('$').unwrap_or(after);
            }
        }
        vec![out + rest]
    }
}

/// Characters before the program that change how it is run.
const PREFIXES: &[char] = &['-', '@', ':', '+', '!', '|'];

fn prefix(exec: &str) -> &str {
    exec.strip_suffix(exec.trim_start_matches(PREFIXES)).unwrap_or_default()
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn pair(word: &str) -> Option<(String, String)> {
    word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// Splits a line at white space. Quotes keep a word together and are removed.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if quote.is_none() && c.is_whitespace() {
            words.extend(word.take());
            continue;
        }
        let current = word.get_or_insert_default();
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (Some('"') | None, '\\') => current.extend(chars.next()),
            (_, c) => current.push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: &str = "[Unit]\nExecStart=/not/here\n[Service]\nExecStart=/usr/bin/kubelet\nRestart=always\n";
    const KUBEADM: &str = "# Note: ExecStart=\n[Service]\n\
        Environment=\"KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/b.conf --kubeconfig=/etc/k.conf\"\n\
        Environment=\"KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml\"\n\
        EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\n\
        EnvironmentFile=-/etc/default/kubelet\n\
        ExecStart=\n\
        ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS \\\n  $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS\n";

    #[test]
    fn the_drop_in_of_kubeadm_gives_the_command_line_of_the_kubelet() {
        let mut unit = UnitCommand::parse([UNIT, KUBEADM]);
        assert_eq!(unit.program(), Some("/usr/bin/kubelet".into()));
        assert_eq!(
            unit.environment_files,
            [PathBuf::from("/var/lib/kubelet/kubeadm-flags.env"), PathBuf::from("/etc/default/kubelet")]
        );
        unit.add_file("KUBELET_KUBEADM_ARGS=\"--node-ip=10.0.0.1 --pod-infra-container-image=p:1\"\n# X=y\n");
        unit.add_file("KUBELET_EXTRA_ARGS=--v=2\n");
        assert_eq!(
            unit.arguments(),
            [
                "--bootstrap-kubeconfig=/etc/b.conf",
                "--kubeconfig=/etc/k.conf",
                "--config=/var/lib/kubelet/config.yaml",
                "--node-ip=10.0.0.1",
                "--pod-infra-container-image=p:1",
                "--v=2"
            ]
        );
        assert_eq!(
            unit.raw_arguments().split_whitespace().collect::<Vec<_>>(),
            [
                "$KUBELET_KUBECONFIG_ARGS",
                "$KUBELET_CONFIG_ARGS",
                "$KUBELET_KUBEADM_ARGS",
                "$KUBELET_EXTRA_ARGS"
            ]
        );
    }

    #[test]
    fn words_prefixes_and_variables_are_read_as_by_systemd() {
        for (exec, program, arguments) in [
            ("/k", "/k", vec![]),
            ("-/k --a=1", "/k", vec!["--a=1"]),
            ("@/k name --a", "/k", vec!["--a"]),
            (
                "/k --a=${A} \"$L\" $L x${L}y $NONE --b='c d' $$A",
                "/k",
                vec!["--a=1", "l", "m", "l", "m", "xl my", "--b=c d", "$A"],
            ),
        ] {
            let mut unit = UnitCommand::parse([format!("[Service]\nExecStart={exec}\n").as_str()]);
            unit.add_file("A=1\nL='l m'\n");
            assert_eq!(unit.program(), Some(program.into()), "{exec}");
            assert_eq!(unit.arguments(), arguments, "{exec}");
        }
        let none = UnitCommand::parse([
            "[Service]\nExecStart=/k\nEnvironment=A=1\n",
            "[Service]\nExecStart=\nEnvironment=\n",
        ]);
        assert_eq!(none, UnitCommand::default());
    }
}
