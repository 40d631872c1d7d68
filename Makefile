# Commands of the project. scripts/setup installs their requirements; a second run of it does nothing.
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
GPUAAS := .venv/bin/gpuaas
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/build/collections
# The default scenario plays the whole bootstrap; `ls molecule` lists the others.
SCENARIO ?= slice_host
# Release of the lab host.
DISTRO ?= $(GPUAAS_LAB_DISTRO)

help: ## Show this list
	@awk -F':.*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Main commands
setup: ## Install what the project needs: packages, Python environment, collection path
	@scripts/setup

demo: ## Play the main job: prepare a slice host, launch a GPU VM for a tenant, release it and wipe its slot
	@scripts/setup --demo
	@$(PYTHON) -m lab.demo

run: setup ## Start the reconciler and its console on 127.0.0.1 with SQLite; ends with its address and a login
	@$(GPUAAS) serve --login

##@ Tests
test: ## Run all tests of CI; results by requirement in build/coverage
	@scripts/setup --tests
	@scripts/test all

test-fast: ## Run the tests of rules, records, stories and modules, without processes and servers
	@scripts/setup --tests
	@scripts/test fast

test-long: ## Run all lab tests and the other tests that take minutes: by hand, or nightly
	@scripts/setup --tests
	@scripts/test long

lint: setup ## Run ruff, mypy --strict, yamllint, ansible-lint
	@scripts/lint

sanity: setup ## Run ansible-test sanity on the built archive of the collection
	@scripts/sanity

molecule: setup ## Test a role's drift and repair on the lab host: make molecule SCENARIO=slice_network
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PYTHON) -m scripts.scenarios --play $(SCENARIO)

bench: ## Measure against the named peers; adds to build/bench.json (CLAIMS=--no-peer skips OpenStack)
	@scripts/setup --tests
	@$(PYTHON) -m tests.bench
	@$(PYTHON) -m tests.bench.clone
	@$(PYTHON) -m tests.bench.claims $(CLAIMS)
	@$(PYTHON) -m tests.bench.tasks
	@$(PYTHON) -m tests.bench.memory
	@$(PYTHON) -m tests.bench.console
	@$(PYTHON) -m tests.bench.gateway
	@$(PYTHON) -m tests.bench.jobs

image: setup ## Build an image for slices in build/images: make image RECIPE=base, or gpu with NVIDIA's driver and RDMA; WORKER=1 adds the worker kit
	@$(GPUAAS) lab image $(or $(RECIPE),base) $(if $(WORKER),--worker)

scripts: setup ## Build the single-file programs into build/scripts
	@$(PYTHON) -m scripts.standalone

deb: setup ## Build the Debian package of the service into build/deb
	@scripts/deb

archive: setup ## Build the archive of the collection with its changelog into build/dist
	@scripts/collection-archive

ee: setup ## Make the build context of AWX's execution environment: make ee CA=trust/host_ca.pub
	@scripts/execution-environment "$(CA)"

docs-site: setup ## Build the documentation site with a page of each module into build/site
	@$(PYTHON) -m scripts.docs_site

standins: ## Run stand-ins of NetBox, MAAS, UFM and AWX until interrupted, to look at the whole
	@scripts/setup --tests
	@$(PYTHON) -m tests.standin build/standins

##@ Lab host
lab-up: setup ## Boot the lab host and leave it running: make lab-up DISTRO=trixie for Debian 13
	@GPUAAS_LAB_DISTRO=$(DISTRO) $(GPUAAS) lab up

lab-ssh: setup ## Open a shell on the lab host
	@$(GPUAAS) lab ssh

lab-down: setup ## Stop the lab host
	@$(GPUAAS) lab down

lab-save: setup ## Save a copy of the lab host's disks: make lab-save NAME=ready
	@$(GPUAAS) lab save $(NAME)

lab-load: setup ## Boot the lab host from a saved copy: make lab-load NAME=ready
	@GPUAAS_LAB_DISTRO=$(DISTRO) $(GPUAAS) lab load $(NAME)
	@GPUAAS_LAB_DISTRO=$(DISTRO) $(GPUAAS) lab up

lab-saved: setup ## List the saved lab hosts
	@$(GPUAAS) lab saved

lab-delete: setup ## Delete a saved lab host: make lab-delete NAME=ready
	@$(GPUAAS) lab delete $(NAME)

##@ Maintenance
lock: ## Resolve the dependencies again into requirements.lock and requirements-dev.lock
	@scripts/lock

sbom: setup ## List the service's packages with their hashes in build/sbom.json (CycloneDX)
	@$(PYTHON) -m scripts.sbom

audit: setup ## Ask the public databases for known vulnerabilities of the service's packages
	@.venv/bin/uv tool run pip-audit==2.10.1 --strict --disable-pip --require-hashes -r requirements.lock

.PHONY: help setup demo run test test-fast test-long lint sanity molecule bench scripts deb archive ee docs-site standins lab-up lab-ssh lab-down \
	lab-save lab-load lab-saved lab-delete lock sbom audit
