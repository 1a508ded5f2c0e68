//! A headless Chromium that opens one page. It is driven over the DevTools protocol, whose messages go through
//! pipes.

use std::process::Stdio;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::{PATIENCE, executable, in_time};

/// A browser with one page. Dropping it ends the browser.
#[derive(Debug)]
pub struct Browser {
    _child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    session: String,
    next: u64,
    /// The page's errors: exceptions, lines of `console.error`, and violations of its policy.
    errors: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// Opens a page of this size, and returns once it is loaded.
    pub async fn open(url: &str, width: u32, height: u32) -> Self {
        let profile = tempfile::tempdir().expect("a folder");
        // Chromium reads commands from file descriptor 3 and writes answers to 4. Its sandbox does not run as
        // root, and the page is ours.
        let mut child = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 >/dev/null 2>&1"#])
            .arg(executable::chromium())
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg(format!("--window-size={width},{height}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("./test.sh installs Chromium");
        let (to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut browser = Self {
            _child: child,
            to,
            from: BufReader::new(from),
            session: String::new(),
            next: 0,
            errors: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" })).await;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach).await;
        browser.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Runtime.enable", "Log.enable", "Page.enable"] {
            browser.call(domain, json!({})).await;
        }
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", size).await;
        browser.call("Page.navigate", json!({ "url": url })).await;
        browser.until("document.readyState === 'complete'").await;
        browser
    }

    /// Returns the value of a JavaScript expression. Waits for it if it is a promise.
    pub async fn value(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", params).await;
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub async fn until(&mut self, expression: &str) {
        let began = tokio::time::Instant::now();
        while self.value(expression).await != json!(true) {
            let text = || "document.body.innerText";
            if began.elapsed() > PATIENCE {
                panic!(
                    "waited {PATIENCE:?} for {expression}: {}: {:?}",
                    self.value(text()).await,
                    self.errors
                );
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    /// Returns a picture of the page as WebP, in base64.
    pub async fn picture(&mut self) -> String {
        let params = json!({ "format": "webp", "quality": 60 });
        let picture = self.call("Page.captureScreenshot", params).await;
        picture["data"].as_str().expect("a picture").to_owned()
    }

    /// Returns the page's errors so far.
    pub fn errors(&self) -> &[String] {
        &self.errors
    }

    /// Calls a method of the protocol and returns its result. Events that come before it are noted.
    pub async fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut call = json!({ "id": self.next, "method": method, "params": params });
        if !self.session.is_empty() {
            call["sessionId"] = json!(self.session);
        }
        let message = [call.to_string().as_bytes(), b"\0"].concat();
        in_time(method, self.to.write_all(&message)).await.expect("Chromium reads");
        loop {
            let mut message = Vec::new();
            let read = in_time(method, self.from.read_until(0, &mut message)).await.expect("Chromium writes");
            assert!(read > 0, "Chromium ended: {method}");
            message.pop();
            let mut message: Value = serde_json::from_slice(&message).expect("JSON");
            if message["id"] == self.next {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        let is_wrong = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => params["type"] == "error",
            // A status that is no success is also an entry of the log. Pages may expect one.
            Some("Log.entryAdded") => {
                params["entry"]["level"] == "error" && params["entry"]["source"] != "network"
            }
            _ => false,
        };
        if is_wrong {
            self.errors.push(params.to_string());
        }
    }
}
